"""Agents that own their loop: programs that ask the policy through an OpenAI-compatible server."""
