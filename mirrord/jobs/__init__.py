"""The carriers of background work: operations, events, the schedule, watched files."""
