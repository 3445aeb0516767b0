//go:build unix

package command_test

import "syscall"

func setUmask(mask int) int { return syscall.Umask(mask) }
