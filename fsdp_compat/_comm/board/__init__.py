"""What ranks learn about each other while they wait, and how a wait that can never end is aborted.
Nothing here knows how messages are sent."""
