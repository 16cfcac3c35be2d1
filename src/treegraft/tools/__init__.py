"""Tools that an agent may call, and the toolbox that runs the calls."""
