//go:build !linux

package main

import (
	"io"
	"os"
)

// rawStdio gives stdin and stdout.
func rawStdio() (io.Reader, io.Writer) { return os.Stdin, os.Stdout }
