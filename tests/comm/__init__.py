"""How ranks exchange bytes, and how waits that cannot end are noticed."""
