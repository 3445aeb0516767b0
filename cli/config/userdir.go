package config

import (
	"errors"
	"path/filepath"
	"runtime"
)

// userConfigDir is os.UserConfigDir with an environment of the caller's.
func userConfigDir(getenv func(string) string) (string, error) {
	switch runtime.GOOS {
	case "windows":
		if d := getenv("AppData"); d != "" {
			return d, nil
		}
		return "", errors.New("%AppData% is not set")
	case "darwin":
		if h := getenv("HOME"); h != "" {
			return filepath.Join(h, "Library", "Application Support"), nil
		}
	default:
		if h := getenv("HOME"); h != "" {
			return filepath.Join(h, ".config"), nil
		}
	}
	return "", errors.New("$HOME is not set")
}
