"""Commands and benchmarks: nothing else imports them."""
