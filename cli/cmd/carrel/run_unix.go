//go:build unix

package main

import (
	"context"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
)

// runProgram puts the program in this one's place, so that signals, the terminal and the exit status are its own.
func runProgram(_ context.Context, argv []string) (int, error) {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return 0, err
	}
	return 0, unix.Exec(path, argv, os.Environ())
}
