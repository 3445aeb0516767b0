package sshconfig

import (
	"fmt"
	"os"
	"path/filepath"
)

// UserDir returns the directory that ssh reads its configuration from.
func UserDir() (string, error) {
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("no home directory: %w; name the ssh configuration with CARREL_SSH_CONFIG", err)
	}
	return filepath.Join(home, ".ssh"), nil
}
