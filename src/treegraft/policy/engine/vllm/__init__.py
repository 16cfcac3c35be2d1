"""The engine that samples on vLLM servers: requests, fleet, publishing, and the part that runs in
the server."""
