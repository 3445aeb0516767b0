//go:build unix

package sshconfig

import (
	"bufio"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
)

// UserDir returns the directory that ssh reads its configuration from: .ssh in the home that the user database has,
// whatever $HOME says (ssh(1) uses getpwuid(3)).
func UserDir() (string, error) {
	home, err := passwdHome(strconv.Itoa(os.Getuid()))
	if err != nil {
		return "", err
	}
	return filepath.Join(home, ".ssh"), nil
}

// passwdHome reads /etc/passwd, as os/user without cgo puts $HOME first; users of other databases fall back to os/user.
func passwdHome(uid string) (string, error) {
	f, err := os.Open("/etc/passwd")
	if err == nil {
		defer func() { _ = f.Close() }()
		for s := bufio.NewScanner(f); s.Scan(); {
			fields := strings.Split(s.Text(), ":")
			if len(fields) >= 7 && fields[2] == uid && filepath.IsAbs(fields[5]) {
				return fields[5], nil
			}
		}
	}
	u, err := user.LookupId(uid)
	if err != nil || !filepath.IsAbs(u.HomeDir) {
		return "", fmt.Errorf("the user database has no home for uid %s: name the ssh configuration with CARREL_SSH_CONFIG", uid)
	}
	return u.HomeDir, nil
}
