// Command carreld runs Carrel's servers: the gateway, the agent of a GPU host, or both in one process for one machine.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"

	"github.com/carrel-dev/carrel/services/fleet"
)

// version is set by the build (-X main.version=...).
var version = "devel"

const usage = `usage: carreld gateway|agent|dev|config|recover|version [flags]

  gateway        the API, scheduler and ledger; one for a deployment
  agent          GPU inventory and containers of one host; dials the gateway
  dev            gateway and agent in one process: the quick start, a one-box lab
  config print   all settings of the gateway with their effective values
  recover        after the database was put back from an older copy, with the gateway stopped: hosts follow it again
  version        the version

carreld COMMAND --help lists the flags of a command.
`

// Exit codes.
const (
	exitFailed = 1
	exitUsage  = 2
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run is main with its surroundings given, and returns the exit code.
func run(args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		fmt.Fprint(stderr, usage)
		return exitUsage
	}
	ctx, stop := untilSignal(stderr)
	defer stop()
	commands := map[string]func(context.Context, []string, io.Writer, io.Writer) error{
		"gateway": runGateway, "agent": runAgent, "dev": runDev, "config": runConfig, "recover": runRecover,
		"version": func(context.Context, []string, io.Writer, io.Writer) error {
			_, err := fmt.Fprintln(stdout, version)
			return err
		},
	}
	command, ok := commands[args[0]]
	if !ok {
		if args[0] == "help" || args[0] == "--help" || args[0] == "-h" {
			fmt.Fprint(stdout, usage)
			return 0
		}
		fmt.Fprintf(stderr, "carreld: there is no command %q\n%s", args[0], usage)
		return exitUsage
	}
	err := command(ctx, args[1:], stdout, stderr)
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case errors.Is(err, errUsage):
		return exitUsage
	}
	fmt.Fprintf(stderr, "carreld: %v\n", err)
	if fleet.IsKind(err, fleet.KindInvalid) {
		return exitUsage
	}
	return exitFailed
}

// errUsage is a wrong flag, which the flag package has told already.
var errUsage = errors.New("usage")

// untilSignal returns a context that ends at the first SIGINT or SIGTERM; the second ends the process at once.
func untilSignal(stderr io.Writer) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	var stopped atomic.Bool
	go func() {
		for sig := range signals {
			if stopped.Swap(true) {
				fmt.Fprintln(stderr, "carreld: second signal, ending at once")
				os.Exit(exitFailed)
			}
			cancel(fmt.Errorf("got %s", sig))
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(signals)
		cancel(nil)
	}
}

// logger returns the program's log on stderr.
func logger(w io.Writer, level, format string) *slog.Logger {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		l = slog.LevelInfo // config has checked it already
	}
	opts := &slog.HandlerOptions{Level: l}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
