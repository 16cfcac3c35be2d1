"""One policy: loaded, sampled by an engine, changed by the learner, saved."""
