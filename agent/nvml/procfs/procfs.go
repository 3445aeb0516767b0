// Package procfs reads what the kernel says about a process.
package procfs

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/carrel-dev/carrel/agent/gpu"
)

// FS is a mounted proc file system.
type FS struct{ root string }

var _ gpu.Proc = FS{}

// New returns the proc file system mounted at root, "/proc" on every host. It must be that of the host's pid namespace,
// since NVML reports host pids.
func New(root string) FS { return FS{root: root} }

// Cgroup returns the content of /proc/<pid>/cgroup.
func (fs FS) Cgroup(pid int) ([]byte, error) { return fs.read(pid, "cgroup") }

// Name returns the process's name as the kernel keeps it, at most 15 bytes. The process chose it: printable
// characters are kept, others become '?'.
func (fs FS) Name(pid int) (string, error) {
	b, err := fs.read(pid, "comm")
	if err != nil {
		return "", err
	}
	return strings.Map(func(r rune) rune {
		if strconv.IsPrint(r) && r != '\ufffd' {
			return r
		}
		return '?'
	}, strings.TrimSuffix(string(b), "\n")), nil
}

func (fs FS) read(pid int, name string) ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(fs.root, strconv.Itoa(pid), name))
	if err != nil {
		return nil, fmt.Errorf("read %s of process %d: %w", name, pid, err)
	}
	return b, nil
}
