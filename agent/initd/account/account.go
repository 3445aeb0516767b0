package account

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
)

// Sudo's state, as it is reported.
const (
	SudoYes       = "yes"
	SudoNotInPool = "no: pool"
	SudoNotThere  = "no: image has no sudo"
)

// Request is what Apply makes true.
type Request struct {
	User User
	Sudo bool // whether the pool allows sudo
}

// Result says what was found.
type Result struct {
	Sudo  string // one of SudoYes, SudoNotInPool, SudoNotThere
	Shell string // the login shell; empty when the image has none
}

// ErrHomeOwner says that the home holds another user's files.
var ErrHomeOwner = errors.New("the home belongs to another user")

// loginPattern is useradd's default rule (shadow's NAME_REGEX), and 32 characters at most.
func loginPattern() *regexp.Regexp { return regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`) }

// Apply writes the user's lines under root ("/" in a container), gives the home to the user and writes or removes the sudo rule.
// It may be called again at any time; what is right already is not written.
func Apply(root string, req Request) (Result, error) {
	if err := check(req.User); err != nil {
		return Result{}, err
	}
	shell := defaultShell(root)
	if err := writeLines(root, shell, req.User); err != nil {
		return Result{}, err
	}
	if err := prepareHome(root, req.User); err != nil {
		return Result{}, err
	}
	sudo, err := applySudo(root, req)
	if err != nil {
		return Result{}, err
	}
	return Result{Sudo: sudo, Shell: shell}, nil
}

func check(u User) error {
	switch {
	case !loginPattern().MatchString(u.Login):
		return fmt.Errorf("login %q: use 1 to 32 of a-z, 0-9, _ and -, beginning with a letter", u.Login)
	case u.UID < 1000 || u.GID < 1:
		return fmt.Errorf("uid %d, gid %d: a workspace's user has a uid of 1000 or more and a gid above 0", u.UID, u.GID)
	case !filepath.IsAbs(u.Home) || filepath.Clean(u.Home) != u.Home || u.Home == "/" || strings.ContainsAny(u.Home, ":\n"):
		return fmt.Errorf("home %q: must be a clean absolute path without a colon", u.Home)
	}
	for _, g := range u.Groups {
		if g.GID < 1 || strings.ContainsAny(g.Name, ":,\n") {
			return fmt.Errorf("group %q, gid %d: the name may not hold colons or commas, the gid is above 0", g.Name, g.GID)
		}
	}
	return nil
}

func defaultShell(root string) string {
	for _, shell := range []string{"/bin/bash", "/bin/sh", "/bin/ash"} {
		if info, err := os.Stat(filepath.Join(root, shell)); err == nil && info.Mode()&0o111 != 0 {
			return shell
		}
	}
	return ""
}

func writeLines(root, shell string, u User) error {
	if shell == "" {
		shell = "/bin/sh" // for an image without one: the field may not be empty, and the file need not be there
	}
	etc := filepath.Join(root, "etc")
	if err := os.MkdirAll(etc, 0o755); err != nil {
		return fmt.Errorf("make /etc: %w", err)
	}
	edits := []struct {
		name     string
		mode     fs.FileMode
		optional bool
		edit     func(string) string
	}{
		{"passwd", 0o644, false, func(old string) string { return passwdLines(old, shell, u) }},
		{"group", 0o644, false, func(old string) string { return groupLines(old, u) }},
		{"shadow", 0o640, true, func(old string) string { return shadowLines(old, u) }},
	}
	for _, e := range edits {
		if err := editFile(filepath.Join(etc, e.name), e.mode, e.optional, e.edit); err != nil {
			return err
		}
	}
	return nil
}

// editFile changes a file by edit, in one step where the directory lets it. Owner and mode stay.
func editFile(path string, mode fs.FileMode, optional bool, edit func(string) string) error {
	old, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) && optional {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read %s: %w", path, err)
	}
	fresh := edit(string(old))
	if fresh == string(old) {
		return nil
	}
	return replaceFile(path, []byte(fresh), mode)
}

// replaceFile writes beside path and renames. A file that cannot be renamed over (mounted by itself) is written in place.
func replaceFile(path string, data []byte, mode fs.FileMode) error {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	uid, gid := 0, 0
	if info, err := os.Stat(path); err == nil {
		st := info.Sys().(*syscall.Stat_t)
		mode, uid, gid = info.Mode().Perm(), int(st.Uid), int(st.Gid)
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".carrel-")
	if err != nil {
		return writeInPlace(path, data, mode)
	}
	defer os.Remove(tmp.Name()) // gone after the rename
	_, err = tmp.Write(data)
	err = errors.Join(err, tmp.Chmod(mode))
	if os.Getuid() == 0 {
		err = errors.Join(err, tmp.Chown(uid, gid))
	}
	if err := errors.Join(err, tmp.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return writeInPlace(path, data, mode)
	}
	return nil
}

func writeInPlace(path string, data []byte, mode fs.FileMode) error {
	if err := os.WriteFile(path, data, mode); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// applySudo writes or removes our one file; the image's own rules are never touched.
func applySudo(root string, req Request) (string, error) {
	rule := filepath.Join(root, "etc/sudoers.d/carrel")
	if !req.Sudo {
		if err := os.Remove(rule); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("remove sudo rule: %w", err)
		}
		return SudoNotInPool, nil
	}
	if !hasSudo(root) {
		return SudoNotThere, nil
	}
	if err := os.MkdirAll(filepath.Dir(rule), 0o750); err != nil {
		return "", fmt.Errorf("make sudoers.d: %w", err)
	}
	text := req.User.Login + " ALL=(ALL:ALL) NOPASSWD: ALL\n"
	if old, err := os.ReadFile(rule); err == nil && string(old) == text {
		return SudoYes, nil
	}
	if err := replaceFile(rule, []byte(text), 0o440); err != nil {
		return "", err
	}
	return SudoYes, nil
}

func hasSudo(root string) bool {
	for _, dir := range []string{"usr/bin", "bin", "usr/local/bin", "usr/sbin", "sbin"} {
		info, err := os.Stat(filepath.Join(root, dir, "sudo"))
		if err == nil && info.Mode()&0o111 != 0 {
			return true
		}
	}
	return false
}
