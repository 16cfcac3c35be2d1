"""Sessions of OpenEnv servers as environments."""
