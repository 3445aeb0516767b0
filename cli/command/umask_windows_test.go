package command_test

// setUmask does nothing: Windows has no umask.
func setUmask(int) int { return 0 }
