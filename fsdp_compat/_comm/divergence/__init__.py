"""What ranks find out about each other while they wait, and how a wait that can never end is ended.
Nothing here knows how messages travel."""
