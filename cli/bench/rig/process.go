//go:build linux

// Package rig starts the real programs and their bare peers on one machine and reads what they cost.
package rig

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// stopGrace is how long a program has to end by itself after SIGTERM.
const stopGrace = 20 * time.Second

// Process is a program that was started here and that writes its output to a log file.
type Process struct {
	Name string
	Log  string
	cmd  *exec.Cmd
	done chan struct{}
}

// Start runs argv in a process group of its own. env is added to this program's environment; log is appended to.
func Start(name, log string, env []string, argv ...string) (*Process, error) {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	p := &Process{Name: name, Log: log, cmd: exec.Command(argv[0], argv[1:]...), done: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = f, f
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended stands in its log; that it ended is what callers look at
		close(p.done)
	}()
	return p, nil
}

// PID returns the process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Running reports whether it has not ended yet.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Stop asks it to end, kills it after a grace, and waits.
func (p *Process) Stop() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
		return nil
	case <-time.After(stopGrace):
	}
	p.Kill()
	return fmt.Errorf("%s did not end within %v of SIGTERM and was killed", p.Name, stopGrace)
}

// Kill ends it at once, as kill -9 does, and waits.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// Tail returns the last lines of its log.
func (p *Process) Tail() string { return tail(p.Log, 12) }

func tail(path string, lines int) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(content), "\n"), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	return strings.Join(all, "\n")
}

// WaitHTTP waits until url answers 200, the process ends, or limit is over.
func (p *Process) WaitHTTP(ctx context.Context, client *http.Client, url string, limit time.Duration) error {
	return p.wait(ctx, url, limit, func(ctx context.Context) bool {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return false
		}
		resp, err := client.Do(req)
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
}

// WaitTCP waits until address accepts a connection, the process ends, or limit is over.
func (p *Process) WaitTCP(ctx context.Context, address string, limit time.Duration) error {
	return p.wait(ctx, address, limit, func(ctx context.Context) bool {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		if err != nil {
			return false
		}
		_ = conn.Close()
		return true
	})
}

func (p *Process) wait(ctx context.Context, what string, limit time.Duration, ready func(context.Context) bool) error {
	err := Poll(ctx, limit, func(ctx context.Context) (bool, error) {
		if !p.Running() {
			return false, fmt.Errorf("%s ended before %s answered; its last lines (%s):\n%s", p.Name, what, p.Log, p.Tail())
		}
		return ready(ctx), nil
	})
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return fmt.Errorf("%s: %s does not answer within %v; its last lines (%s):\n%s", p.Name, what, limit, p.Log, p.Tail())
	}
	return err
}

// pollEvery is the pause between two looks; short against all that is waited for, and not part of any figure.
const pollEvery = 20 * time.Millisecond

// Poll calls look until it says true or fails, or limit is over (context.DeadlineExceeded).
func Poll(ctx context.Context, limit time.Duration, look func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		done, err := look(ctx)
		if done || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// FreePort returns a loopback port that nothing listens on now.
func FreePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port, nil
}
