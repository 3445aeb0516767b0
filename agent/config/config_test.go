package config_test

import (
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/agent/config"
	"github.com/carrel-dev/carrel/agent/host"
)

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLayers(t *testing.T) {
	file := write(t, "data: /srv/carrel\nengine:\n  call_timeout: 5s\n  log_files: 7\ngpus: none\n")
	fs := flag.NewFlagSet("agent", flag.ContinueOnError)
	named := config.Flags(fs, "config")
	if err := fs.Parse([]string{"--config", file, "--gpus", "simulated:2x4090"}); err != nil {
		t.Fatal(err)
	}
	c, err := config.Load(*named, []string{"CARREL_AGENT_ENGINE_LOG_FILES=9", "HOME=/x"}, fs)
	if err != nil {
		t.Fatal(err)
	}
	if c.DataDir != "/srv/carrel" || c.EngineCallTimeout != 5*time.Second || c.EngineLogFiles != 9 || c.GPUs != "simulated:2x4090" {
		t.Errorf("%+v", c)
	}
	if c.Heartbeat != 10*time.Second || c.PolicyFile != config.DefaultPolicyFile || c.PolicyNamed {
		t.Errorf("defaults: %+v", c)
	}
}

// Every fault is told at once, with the line that has it.
func TestAllFaultsTogether(t *testing.T) {
	file := write(t, "data: here\ndta: x\nengine:\n  call_timeout: 5\n  call_timeout: 5s\n  nothing: 1\nlink: 3\ntimes:\n  list: -1s\n")
	fs := flag.NewFlagSet("agent", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	config.Flags(fs, "config")
	if err := fs.Parse([]string{"--gpus", "simulated:4xUNKNOWN", "--engine-log-files", "many"}); err != nil {
		t.Fatal(err)
	}
	_, err := config.Load(file, []string{"CARREL_AGENT_NONE=1", "CARREL_AGENT_LINK_STREAMS=x"}, fs)
	if err == nil {
		t.Fatal("no fault")
	}
	for _, want := range []string{
		file + ":2: unknown setting dta", file + ":4: engine.call_timeout must be a duration", file + ":5: engine.call_timeout is set twice",
		file + ":6: unknown setting engine.nothing", file + ":7: expected", "times.list: \"-1s\" must be more than 0s", "data: \"here\" must be an absolute path",
		"CARREL_AGENT_NONE is no setting", "CARREL_AGENT_LINK_STREAMS=\"x\" must be a whole number", "UNKNOWN", "--engine-log-files \"many\" must be",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in\n%v", want, err)
		}
	}
}

func TestNoSettingsFile(t *testing.T) {
	if _, err := config.Load("/none/agent.yaml", nil, nil); err == nil {
		t.Error("a settings file that is not there")
	}
	if _, err := config.Load(write(t, ""), nil, nil); err != nil {
		t.Errorf("an empty file: %v", err)
	}
}

func TestPolicyFile(t *testing.T) {
	good := write(t, `images: [registry.example.com/team/*, carrel/base]
mounts:
  - path: /data
  - {path: /scratch, writable: true}
uids: [500, 600-699]
max_gpus: 4
reserve: {cpus: 1.5, memory: 2GiB, disk: 512MiB}
`)
	p, err := config.Policy(good, true)
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Images) != 2 || len(p.Mounts) != 2 || !p.Mounts[1].Writable || p.UIDs[1] != (host.UIDRange{First: 600, Last: 699}) || p.MaxGPUs != 4 ||
		p.ReserveCPUMillis != 1500 || p.ReserveMemoryMiB != 2048 || p.ReserveDiskMiB != 512 {
		t.Errorf("%+v", p)
	}
	if _, err := config.Policy("/none/policy.yaml", false); err != nil {
		t.Errorf("a default file that is not there: %v", err)
	}
	if _, err := config.Policy("/none/policy.yaml", true); err == nil {
		t.Error("a named file that is not there")
	}
}

func TestPolicyFaultsTogether(t *testing.T) {
	file := write(t, `privileged: true
images: x y
mounts:
  - path: data
  - path: /
  - {path: /ok, mode: rw}
uids: [a, 0, 5-3]
max_gpus: -1
reserve: {memory: 2, cpus: x}
`)
	_, err := config.Policy(file, true)
	if err == nil {
		t.Fatal("no fault")
	}
	for _, want := range []string{
		":1: privileged is unknown", ":2: expected a list of image", `"data" is not an absolute path`, `"/" is the whole host`, ":6: mode is unknown",
		":7: expected a user id", "0-0 is no range", "5-3 is no range", "max_gpus: may not be negative", ":9: expected a size", ":9: expected a number of cores",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in\n%v", want, err)
		}
	}
}

// A policy that others than root could have written bounds nothing.
func TestPolicyBelongsToRoot(t *testing.T) {
	for name, spoil := range map[string]func(string) error{
		"writable by others": func(p string) error { return os.Chmod(p, 0o666) },
		"another's":          func(p string) error { return os.Chown(p, 54321, 0) },
		"a link": func(p string) error {
			if err := os.Rename(p, p+".real"); err != nil {
				return err
			}
			return os.Symlink(p+".real", p)
		},
	} {
		file := write(t, "max_gpus: 1\n")
		if err := spoil(file); err != nil {
			t.Fatal(err)
		}
		if _, err := config.Policy(file, true); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}
