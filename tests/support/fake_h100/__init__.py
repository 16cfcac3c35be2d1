"""An H100 that compiles and launches nothing: torch's build for CPUs is told that it has one."""
