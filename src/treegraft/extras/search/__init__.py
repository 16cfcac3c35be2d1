"""Search by servers and in the web, and a server of one's own."""
