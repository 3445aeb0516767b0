// Package wholefile replaces files so that a reader, or a crash, sees the old content or the new one, whole.
package wholefile

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	tempMark = ".new-"     // stands in the names of files that are being written
	leftover = time.Minute // age from which such a file has no writer any more; writing takes milliseconds
)

// maxLinks is how many symbolic links in a row are followed; the same bound as the Linux kernel's (path_resolution(7)).
const maxLinks = 40

// ErrSymlink says that a file which must not be a symbolic link is one.
var ErrSymlink = errors.New("is a symbolic link")

// ErrReadOnly says that a file is marked as not to be written.
var ErrReadOnly = errors.New("is read-only")

// WriteSecret writes a file of mode 0600, whatever the umask. It refuses a path that is a symbolic link, so that a
// secret never lands where somebody else pointed.
func WriteSecret(path string, content []byte) error {
	info, err := os.Lstat(path)
	if err == nil && info.Mode()&fs.ModeSymlink != 0 {
		return fmt.Errorf("%s %w: remove it first", path, ErrSymlink)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return replace(path, content, 0o600)
}

// Write replaces a file of mode 0600. Where the content is there already nothing is written; it reports whether it was.
func Write(path string, content []byte) (changed bool, err error) {
	old, err := os.ReadFile(path)
	if err == nil && bytes.Equal(old, content) {
		return false, nil
	}
	return true, replace(path, content, 0o600)
}

// Edit replaces what a file holds by what change makes of it, which gets nil for a file that does not exist. Symbolic
// links stay links: the file that they lead to is replaced. The mode is kept, 0600 for a new file. A file without the
// owner's write bit is refused with ErrReadOnly, also for root. It reports whether anything was written.
func Edit(path string, change func(old []byte) ([]byte, error)) (changed bool, err error) {
	target, err := Resolve(path)
	if err != nil {
		return false, err
	}
	before, err := look(target)
	if err != nil {
		return false, err
	}
	content, err := change(before.content)
	if err != nil || bytes.Equal(before.content, content) { // none and empty are equal
		return false, err
	}
	if err := before.allows(target); err != nil {
		return false, err
	}
	return true, replace(target, content, before.mode)
}

// found is a file as it was.
type found struct {
	there   bool
	mode    fs.FileMode
	content []byte
}

func look(path string) (found, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return found{mode: 0o600}, nil
	case err != nil:
		return found{}, err
	case !info.Mode().IsRegular():
		return found{}, fmt.Errorf("%s is not a regular file", path)
	}
	content, err := os.ReadFile(path)
	return found{there: true, mode: info.Mode().Perm(), content: content}, err
}

// allows reports why a file must not be replaced, nil where it may.
func (f *found) allows(path string) error {
	if !f.there {
		return nil
	}
	if f.mode&0o200 == 0 {
		return fmt.Errorf("%s %w", path, ErrReadOnly)
	}
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, f.content) {
		return fmt.Errorf("%s was changed by another program in between; try again", path)
	}
	return nil
}

// Resolve follows symbolic links at path to the file that they lead to, which need not exist.
func Resolve(path string) (string, error) {
	for range maxLinks {
		info, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) {
			return path, nil
		}
		if err != nil {
			return "", err
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			return path, nil
		}
		to, err := os.Readlink(path)
		if err != nil {
			return "", err
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(path), to)
		}
		path = to
	}
	return "", fmt.Errorf("%s: more than %d symbolic links in a row", path, maxLinks)
}

// replace writes a new file beside path and renames it over path.
func replace(path string, content []byte, mode fs.FileMode) error {
	sweep(path)
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+tempMark+"*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	temp := f.Name()
	if err := fill(f, content, mode); err != nil {
		_ = os.Remove(temp)
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(temp, path); err != nil {
		_ = os.Remove(temp)
		return fmt.Errorf("write %s: %w", path, err)
	}
	return syncDir(filepath.Dir(path))
}

// sweep removes what a writer that was killed left behind.
func sweep(path string) {
	dir, prefix := filepath.Dir(path), "."+filepath.Base(path)+tempMark
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > leftover {
			_ = os.Remove(filepath.Join(dir, e.Name()))
		}
	}
}

func fill(f *os.File, content []byte, mode fs.FileMode) error {
	_, err := f.Write(content)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	return err
}
