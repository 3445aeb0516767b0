// Package config keeps what the CLI knows on this machine: settings, deployments, tokens, keys.
package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strings"
)

// Names of the files in a Dir and in a deployment's directory.
const (
	SettingsFile   = "config.yaml"
	defaultFile    = "default"
	lockFile       = ".lock"
	deploymentsDir = "deployments"
)

// ErrNoDeployment says that nobody is signed in anywhere.
var ErrNoDeployment = errors.New("not signed in to any deployment")

var namePattern = regexp.MustCompile(`^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$`)

// CheckDeploymentName says what is wrong with a deployment's name, which becomes a directory and a part of host names.
func CheckDeploymentName(name string) error {
	if !namePattern.MatchString(name) {
		return fmt.Errorf("deployment name %q: use up to 63 lower-case letters, digits and dashes, begin with a letter", name)
	}
	return nil
}

// Dir is the directory that holds all of it.
type Dir string

// FindDir returns the directory to use: flag, CARREL_CONFIG_DIR, $XDG_CONFIG_HOME/carrel, or the system's own place
// (~/.config/carrel, ~/Library/Application Support/carrel, %AppData%\carrel).
func FindDir(flag string, getenv func(string) string) (Dir, error) {
	for _, d := range []string{flag, getenv("CARREL_CONFIG_DIR")} {
		if d != "" {
			return absolute(d)
		}
	}
	if d := getenv("XDG_CONFIG_HOME"); filepath.IsAbs(d) {
		return absolute(filepath.Join(d, "carrel"))
	}
	d, err := userConfigDir(getenv)
	if err != nil {
		return "", fmt.Errorf("no place for the configuration: %w; set CARREL_CONFIG_DIR", err)
	}
	return absolute(filepath.Join(d, "carrel"))
}

func absolute(d string) (Dir, error) {
	abs, err := filepath.Abs(d)
	if err != nil {
		return "", fmt.Errorf("configuration directory: %w", err)
	}
	if strings.ContainsAny(abs, "\n\r\x00") {
		return "", fmt.Errorf("configuration directory %q: a line break cannot stand in an ssh configuration; choose another", abs)
	}
	return Dir(abs), nil
}

// Make makes the directory where it is missing, for its owner alone.
func (d Dir) Make() error {
	if err := os.MkdirAll(filepath.Join(string(d), deploymentsDir), 0o700); err != nil {
		return fmt.Errorf("make the configuration directory: %w", err)
	}
	return nil
}

// Lock returns the path of the file that guards changes in the directory.
func (d Dir) Lock() string { return filepath.Join(string(d), lockFile) }

func (d Dir) deployment(name string) string { return filepath.Join(string(d), deploymentsDir, name) }

// Deployments returns the names of all deployments, sorted.
func (d Dir) Deployments() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(string(d), deploymentsDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read deployments: %w", err)
	}
	var names []string
	for _, e := range entries {
		if !e.IsDir() || CheckDeploymentName(e.Name()) != nil {
			continue
		}
		if _, err := os.Stat(filepath.Join(d.deployment(e.Name()), recordFile)); err == nil {
			names = append(names, e.Name())
		}
	}
	sort.Strings(names)
	return names, nil
}

// Default returns the name of the default deployment: the chosen one, or the only one; empty where there is none.
func (d Dir) Default() (string, error) {
	names, err := d.Deployments()
	if err != nil {
		return "", err
	}
	b, err := os.ReadFile(filepath.Join(string(d), defaultFile))
	if err == nil {
		chosen := strings.TrimSpace(string(b))
		for _, n := range names {
			if n == chosen {
				return n, nil
			}
		}
	}
	if len(names) == 1 {
		return names[0], nil
	}
	return "", nil
}
