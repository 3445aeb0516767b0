package procfs_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/carrel-dev/carrel/agent/nvml/procfs"
)

func TestThisProcess(t *testing.T) {
	fs := procfs.New("/proc")
	want, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	if name, err := fs.Name(os.Getpid()); err != nil || name != strings.TrimSpace(string(want)) {
		t.Errorf("name %q, %v", name, err)
	}
	if cgroup, err := fs.Cgroup(os.Getpid()); err != nil || !strings.Contains(string(cgroup), ":") {
		t.Errorf("cgroup %q, %v", cgroup, err)
	}
}

func TestNameIsPrintable(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "7"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "7", "comm"), []byte("\x1b[31mé\xff\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if name, err := procfs.New(root).Name(7); err != nil || name != "?[31mé?" {
		t.Errorf("name %q, %v", name, err)
	}
	if _, err := procfs.New(root).Name(8); err == nil {
		t.Error("a process that is not there has a name")
	}
}
