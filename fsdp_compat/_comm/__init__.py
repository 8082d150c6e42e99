"""Who talks to whom, and how a wait that cannot end is seen."""
