"""The planner's error on measurements of other servers that it was not fitted to."""
