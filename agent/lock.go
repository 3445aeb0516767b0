package agent

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Lock takes a data directory for this process alone, so that two agents never act on one journal and its containers; make it the first
// thing. The kernel drops it when the process ends, however it ends. Close the result to give the directory up.
func Lock(dir string) (io.Closer, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the agent's data directory: %w", err)
	}
	path := filepath.Join(dir, "agent.lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the agent's data directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer func() { _ = f.Close() }() // it was only read
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("the file system of %s cannot lock files (%w); put the agent's data on a local disk", dir, err)
		}
		holder, _ := io.ReadAll(io.LimitReader(f, 20)) // a lock without its text is one all the same
		return nil, fmt.Errorf("the agent's data directory %s is in use by process %s; stop that agent first, or name another directory with --data", dir, strings.TrimSpace(string(holder)))
	}
	if err = f.Truncate(0); err == nil {
		_, err = fmt.Fprintf(f, "%d\n", os.Getpid())
	}
	if err != nil && !errors.Is(err, unix.ENOSPC) { // on a full disk the lock holds without its text
		return nil, errors.Join(fmt.Errorf("write %s: %w", path, err), f.Close())
	}
	return f, nil
}
