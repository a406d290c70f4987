"""What happens without a request, or longer than one: operations, events, the schedule, the watched directories."""
