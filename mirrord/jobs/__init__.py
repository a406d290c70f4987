"""What carries background work: operations, events, the schedule, watched files."""
