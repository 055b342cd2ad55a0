"""Speed, always as ratios of contenders measured in one run: `python -m benchmarks.<name>`."""
