"""What callers see: the API surfaces, and the operator's pages."""
