// Package command is the carrel program: one file per verb, each with its options, its constructor and what it runs.
package command

import (
	"context"
	"io"
	"time"
)

// System is what commands may touch of the machine that they run on.
type System struct {
	In       io.Reader
	Out, Err io.Writer
	// Which of them are terminals.
	InTerminal, OutTerminal, ErrTerminal bool
	// Width is the width of the terminal in characters; called at each redraw.
	Width  func() int
	Getenv func(string) string
	Now    func() time.Time
	// Version of this program, such as v0.3.1.
	Version string
	// SSHDir is the directory that ssh reads its configuration from.
	SSHDir func() (string, error)
	// Executable is how this program is called from elsewhere: an absolute path.
	Executable func() (string, error)
	// Run runs another program with this one's streams and returns its exit status; it may put it in this one's place.
	Run func(ctx context.Context, argv []string) (int, error)
	// Output runs another program and returns what it wrote, both streams together.
	Output func(ctx context.Context, argv []string) (string, error)
	// Stdio gives the streams of `proxy` as raw as the system allows.
	Stdio func() (in io.Reader, out io.Writer)
}
