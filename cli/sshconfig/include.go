package sshconfig

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/carrel-dev/carrel/cli/wholefile"
)

// lockWait bounds the wait for another carrel that is writing; its work takes milliseconds.
const lockWait = 10 * time.Second

// Place is where the files lie: the configuration that ssh reads, and ours beside it.
type Place struct {
	User    string // the person's own configuration
	Managed string // ours, which User includes
	// Default is true where User is the file that ssh reads by itself.
	Default bool
}

// PlaceFor returns the place for a configuration file; sshDir is the directory that ssh itself reads from.
func PlaceFor(user, sshDir string) Place {
	user = filepath.Clean(user)
	return Place{
		User:    user,
		Managed: filepath.Join(filepath.Dir(user), "carrel", "config"),
		Default: user == filepath.Join(sshDir, "config"),
	}
}

// IncludeLine returns the line that belongs at the top of User, without a line end. The path is absolute, since ssh
// takes a relative one from $HOME, which need not be the home that it read User from; but a relative one is the way out
// where a character cannot be written in such a line.
func (p Place) IncludeLine() (string, error) {
	if strings.ContainsAny(p.Managed, "\n\r%") || strings.Contains(p.Managed, "${") {
		if p.Default {
			return "Include carrel/config", nil
		}
		return "", fmt.Errorf("path %q: `%%`, `${` or a line break cannot stand in an Include line; choose another file", p.Managed)
	}
	glob := strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(filepath.ToSlash(p.Managed))
	return "Include " + quoteWord(glob), nil
}

// Included reports whether User has the line before anything else that ssh obeys.
func (p Place) Included() (bool, error) {
	content, err := os.ReadFile(p.User)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	line, err := p.IncludeLine()
	if err != nil {
		return false, err
	}
	return includedFirst(content, line), nil
}

// Install puts the Include line at the very top of User; every other byte stays. It reports whether anything changed.
func (p Place) Install(ctx context.Context) (bool, error) {
	return p.edit(ctx, func(content []byte, line string) []byte {
		if includedFirst(content, line) {
			return content
		}
		end := "\n"
		if i := bytes.IndexByte(content, '\n'); i > 0 && content[i-1] == '\r' {
			end = "\r\n"
		}
		return append([]byte(line+end), without(content, line)...)
	})
}

// Uninstall takes the Include line out of User; every other byte stays.
func (p Place) Uninstall(ctx context.Context) (bool, error) {
	return p.edit(ctx, without)
}

func (p Place) edit(ctx context.Context, change func(content []byte, line string) []byte) (bool, error) {
	line, err := p.IncludeLine()
	if err != nil {
		return false, err
	}
	unlock, err := p.lock(ctx)
	if err != nil {
		return false, err
	}
	defer unlock()
	return wholefile.Edit(p.User, func(old []byte) ([]byte, error) { return change(old, line), nil })
}

// WriteManaged writes our file where it differs from content.
func (p Place) WriteManaged(ctx context.Context, content []byte) (bool, error) {
	if old, err := os.ReadFile(p.Managed); err == nil && bytes.Equal(old, content) {
		return false, nil
	}
	unlock, err := p.lock(ctx)
	if err != nil {
		return false, err
	}
	defer unlock()
	return wholefile.Write(p.Managed, content)
}

func (p Place) lock(ctx context.Context) (func(), error) {
	dir := filepath.Dir(p.Managed)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make %s: %w", dir, err)
	}
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	return wholefile.Lock(ctx, filepath.Join(dir, ".lock"))
}

// includedFirst reports whether line is the first one of content that is neither empty nor a comment.
func includedFirst(content []byte, line string) bool {
	for l := range bytes.Lines(content) {
		l = bytes.TrimSpace(l)
		if len(l) == 0 || l[0] == '#' {
			continue
		}
		return string(l) == line
	}
	return false
}

func without(content []byte, line string) []byte {
	kept := make([]byte, 0, len(content))
	for l := range bytes.Lines(content) {
		if string(bytes.TrimSpace(l)) != line {
			kept = append(kept, l...)
		}
	}
	return kept
}

// Names are the literal host names that a person's own configuration has Host blocks for, with their line numbers.
func (p Place) Names() map[string]int {
	names := map[string]int{}
	content, err := os.ReadFile(p.User)
	if err != nil {
		return names
	}
	n := 0
	for l := range strings.Lines(string(content)) {
		n++
		fields := strings.Fields(strings.Replace(l, "=", " ", 1))
		if len(fields) < 2 || !strings.EqualFold(fields[0], "host") {
			continue
		}
		for _, f := range fields[1:] {
			f = strings.Trim(f, `"`)
			if strings.HasPrefix(f, "#") {
				break
			}
			if _, seen := names[f]; !seen && !strings.ContainsAny(f, "*?!") {
				names[strings.ToLower(f)] = n
			}
		}
	}
	return names
}
