"""What carries background work, whatever it is: operations, events, the schedule, watched directories."""
