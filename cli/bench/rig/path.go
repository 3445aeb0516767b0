//go:build linux

package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Cipher is what every measured connection uses, so that no figure compares ciphers.
const Cipher = "aes128-gcm@openssh.com"

// Path is one way to reach an SSH server with the system's ssh.
type Path struct {
	Name   string
	Config string   // file for -F
	Host   string   // as Config knows it
	Dir    string   // a writable directory behind it, in memory where there is one
	Env    []string // what ssh and scp need beside this program's environment
}

// options come before those of Config: ssh takes the first value it finds.
func (p Path) options() []string {
	return []string{
		"-F", p.Config, "-o", "BatchMode=yes", "-o", "Ciphers=" + Cipher, "-o", "Compression=no",
		"-o", "LogLevel=ERROR", "-o", "ConnectTimeout=20",
	}
}

// SSH returns the argv of ssh running a command behind the path. -T: no pty, as all that is measured is programs.
func (p Path) SSH(command ...string) []string {
	return append(append(append([]string{"ssh"}, p.options()...), "-T", p.Host), command...)
}

// SCP returns the argv of scp; a file behind the path is written as Remote gives it.
func (p Path) SCP(from, to string) []string {
	return append(append([]string{"scp", "-q"}, p.options()...), from, to)
}

// Remote names a file behind the path for SCP.
func (p Path) Remote(file string) string { return p.Host + ":" + file }

// Run is one run of a program.
type Run struct {
	In  string   // file for stdin; empty: nothing
	Out string   // file for stdout; empty: kept and returned
	Env []string // more environment
}

// Do runs argv to its end and returns its output and how long it took. A failure carries what it wrote to stderr.
func (r Run) Do(ctx context.Context, argv []string) (string, time.Duration, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), r.Env...)
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C ends it through ctx, not by itself
	var out, errOut limited
	cmd.Stdout, cmd.Stderr = &out, &errOut
	for file, mode := range map[string]int{r.In: os.O_RDONLY, r.Out: os.O_WRONLY | os.O_CREATE | os.O_TRUNC} {
		if file == "" {
			continue
		}
		f, err := os.OpenFile(file, mode, 0o600)
		if err != nil {
			return "", 0, err
		}
		defer func() { _ = f.Close() }()
		if mode == os.O_RDONLY {
			cmd.Stdin = f
		} else {
			cmd.Stdout = f
		}
	}
	began := time.Now()
	err := cmd.Run()
	took := time.Since(began)
	if err != nil {
		return out.String(), took, fmt.Errorf("%s: %w\n%s%s", argv, err, out.String(), errOut.String())
	}
	return out.String(), took, nil
}

// limited keeps the first 64 KiB of what a program writes.
type limited struct{ kept []byte }

func (l *limited) Write(p []byte) (int, error) {
	if room := 64<<10 - len(l.kept); room > 0 {
		l.kept = append(l.kept, p[:min(room, len(p))]...)
	}
	return len(p), nil
}

func (l *limited) String() string { return string(l.kept) }

// FirstByte starts argv, returns how long it took until the first byte of its stdout, and ends it.
func FirstByte(ctx context.Context, argv, env []string) (time.Duration, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	began := time.Now()
	s, err := Open(ctx, argv, env)
	if err != nil {
		return 0, err
	}
	var one [1]byte
	_, err = io.ReadFull(s.Out, one[:])
	took := time.Since(began)
	if err != nil {
		return 0, errors.Join(fmt.Errorf("%s ended without a byte", argv), s.Close())
	}
	cancel()
	_ = s.Close() // it was ended by us
	return took, nil
}

// Session is a program that runs with its stdin and stdout in our hands.
type Session struct {
	In     *os.File
	Out    *os.File
	cmd    *exec.Cmd
	errOut *limited
}

// Open starts argv. The pipes are files, so that a byte passes no goroutine of ours.
func Open(ctx context.Context, argv, env []string) (*Session, error) {
	s := &Session{cmd: exec.CommandContext(ctx, argv[0], argv[1:]...), errOut: &limited{}}
	s.cmd.Env = append(os.Environ(), env...)
	s.cmd.Stderr = s.errOut
	s.cmd.WaitDelay = 5 * time.Second
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	theirIn, ourIn, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	ourOut, theirOut, err := os.Pipe()
	if err != nil {
		_, _ = theirIn.Close(), ourIn.Close()
		return nil, err
	}
	s.In, s.Out, s.cmd.Stdin, s.cmd.Stdout = ourIn, ourOut, theirIn, theirOut
	err = s.cmd.Start()
	_, _ = theirIn.Close(), theirOut.Close()
	if err != nil {
		_, _ = ourIn.Close(), ourOut.Close()
		return nil, fmt.Errorf("start %s: %w", argv[0], err)
	}
	return s, nil
}

// PID returns the program's process id.
func (s *Session) PID() int { return s.cmd.Process.Pid }

// Close ends its stdin, waits for it, and returns what it said where it failed.
func (s *Session) Close() error {
	_ = s.In.Close()
	err := s.cmd.Wait()
	_ = s.Out.Close()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", s.cmd.Args, err, s.errOut.String())
	}
	return nil
}

// Abort ends it without asking.
func (s *Session) Abort() {
	_ = s.cmd.Process.Kill()
	_ = s.Close() // it was killed
}
