// Package initd is carrel-init, the first process of a workspace, in its three roles.
package initd

import (
	"fmt"
	"log/slog"
	"os"
)

// Version is carrel-init's own version, told to the agent. The linker sets it.
const Version = "0.1.0"

// DefaultLink is where the agent's socket is mounted when no --link is given.
const DefaultLink = "unix:/run/carrel-agent/link.sock"

// RunDir is carrel-init's own directory inside the container.
const RunDir = "/run/carrel"

// Exit statuses of carrel-init itself.
const (
	exitUsage  = 2
	exitFailed = 1
)

// Main runs the role that args[1] names and gives the process's exit status. args is os.Args.
func Main(args []string) int {
	if len(args) < 2 {
		return usage()
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil)).With("role", args[1])
	switch args[1] {
	case "init":
		return initMain(args[2:], log)
	case "serve":
		return serveMain(args[2:], log)
	case "session":
		return sessionMain(log)
	case "version":
		fmt.Println(Version)
		return 0
	default:
		return usage()
	}
}

func usage() int {
	fmt.Fprintln(os.Stderr, "usage: carrel-init init [--link ADDRESS] [--grace DURATION] | version")
	return exitUsage
}
