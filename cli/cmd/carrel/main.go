// Command carrel makes, opens and accounts for development workspaces on pooled GPUs.
package main

import (
	"context"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
	_ "time/tzdata" // `usage --tz` on machines without a zone database, such as Windows

	"golang.org/x/term"

	"github.com/carrel-dev/carrel/cli/command"
	"github.com/carrel-dev/carrel/cli/sshconfig"
)

// version is set by the linker.
var version = "dev"

const defaultWidth = 80 // characters, where no terminal tells its own

func main() { os.Exit(run()) }

func run() int {
	ctx, interrupt := command.Interrupted(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() { // ends with the process
		<-signals
		interrupt()
		<-signals
		os.Exit(130)
	}()
	return command.Main(ctx, os.Args[1:], system())
}

func system() command.System {
	return command.System{
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr,
		InTerminal:  term.IsTerminal(int(os.Stdin.Fd())),
		OutTerminal: term.IsTerminal(int(os.Stdout.Fd())),
		ErrTerminal: term.IsTerminal(int(os.Stderr.Fd())),
		Width:       width,
		Getenv:      os.Getenv,
		Now:         time.Now,
		Version:     version,
		SSHDir:      sshconfig.UserDir,
		Executable:  executable,
		Run:         runProgram,
		Output:      programOutput,
		Stdio:       rawStdio,
	}
}

func width() int {
	for _, f := range []*os.File{os.Stderr, os.Stdout} {
		if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 0 {
			return w
		}
	}
	return defaultWidth
}

// executable prefers the name on PATH to the file that it leads to, so that an upgrade which moves a link is followed.
func executable() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	onPath, err := exec.LookPath("carrel")
	if err != nil {
		return self, nil
	}
	if onPath, err = filepath.Abs(onPath); err != nil {
		return self, nil
	}
	a, errA := os.Stat(self)
	b, errB := os.Stat(onPath)
	if errA == nil && errB == nil && os.SameFile(a, b) {
		return onPath, nil
	}
	return self, nil
}

func programOutput(ctx context.Context, argv []string) (string, error) {
	b, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	return string(b), err
}
