package sqlite

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"

	"github.com/carrel-dev/carrel/services/fleet"
)

// lock is an exclusive lock of this process on a file that says who holds it. The kernel drops it when the process ends, however it ends.
type lock struct{ file *os.File }

// takeLock refuses at once with KindConflict while another process holds the lock.
func takeLock(path string) (*lock, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fleet.Wrap(err, fleet.KindUnavailable, "the database's lock file %s cannot be opened", path)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder := readHolder(f)
		closeErr := f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fleet.Errorf(fleet.KindConflict, "the database is in use by %s; stop that gateway first, or give this one another database path", holder)
		}
		return nil, fleet.Wrap(errors.Join(err, closeErr), fleet.KindUnavailable, "the file system of %s cannot lock files; put the database on a local disk", path)
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	if err := writeHolder(f, fmt.Sprintf("process %d on %s", os.Getpid(), host)); err != nil {
		return nil, fleet.Wrap(errors.Join(err, f.Close()), fleet.KindUnavailable, "the database's lock file %s cannot be written", path)
	}
	return &lock{file: f}, nil
}

func writeHolder(f *os.File, text string) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	if _, err := f.WriteAt([]byte(text+"\n"), 0); err != nil && !errors.Is(err, syscall.ENOSPC) {
		return err // on a full disk the lock holds without its text
	}
	return nil
}

func readHolder(f *os.File) string {
	text, err := io.ReadAll(io.NewSectionReader(f, 0, 200))
	if holder := strings.TrimSpace(string(text)); err == nil && holder != "" {
		return holder
	}
	return "another process"
}

// release leaves the file, empty: removing it would let two processes lock two files of one name.
func (l *lock) release() error {
	return errors.Join(l.file.Truncate(0), l.file.Close())
}
