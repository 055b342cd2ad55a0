"""From a config to a trained state: run, steps, schedule, and all that a workdir keeps."""
