"""Pipeline schedules: instruction lists, their validation, and their simulation; pure."""
