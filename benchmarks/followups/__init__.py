"""Several questions on one document through a real server."""
