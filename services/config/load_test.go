package config

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "gateway.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestDefaultsAreValidAndPrintedFileLoadsBackTheSame(t *testing.T) {
	cfg, err := Load("", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	var printed bytes.Buffer
	if err := Print(&printed, cfg); err != nil {
		t.Fatal(err)
	}
	again, err := Load(write(t, printed.String()), nil, nil)
	if err != nil {
		t.Fatalf("%v\n%s", err, printed.String())
	}
	var second bytes.Buffer
	if err := Print(&second, again); err != nil {
		t.Fatal(err)
	}
	if printed.String() != second.String() {
		t.Errorf("printed settings changed:\n%s\n%s", printed.String(), second.String())
	}
}

func TestFlagBeatsEnvironmentBeatsFileBeatsDefault(t *testing.T) {
	file := write(t, "listen: 127.0.0.1:1\nstop:\n  grace: 1s\nscheduler:\n  tick: 2s\nmounts:\n  - {name: data, path: /srv/data, read_only: true}\n")
	fs := flag.NewFlagSet("t", flag.ContinueOnError)
	Flags(fs)
	if err := fs.Parse([]string{"--listen", "127.0.0.1:3", "--dangerous-plain-http"}); err != nil {
		t.Fatal(err)
	}
	cfg, err := Load(file, []string{"CARREL_GATEWAY_LISTEN=127.0.0.1:2", "CARREL_GATEWAY_STOP_GRACE=4s", "PATH=/bin"}, fs)
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Listen != "127.0.0.1:3" || cfg.StopGrace != 4*time.Second || cfg.Tick != 2*time.Second || !cfg.DangerousPlainHTTP {
		t.Errorf("got %q %s %s %t", cfg.Listen, cfg.StopGrace, cfg.Tick, cfg.DangerousPlainHTTP)
	}
	if len(cfg.Mounts) != 1 || cfg.Mounts[0].HostPath != "/srv/data" || !cfg.Mounts[0].ReadOnly {
		t.Errorf("mounts = %+v", cfg.Mounts)
	}
}

func TestAllFaultsAreReportedAtOnceWithFileAndLine(t *testing.T) {
	file := write(t, "lisen: 1\nstop:\n  grace: 5\nimages:\n  allow: all\n  registres: [a]\nlimits:\n  gpus_per_user: many\ntls:\n  cert_file: /x\nmounts:\n  - {name: Data, path: /srv}\n")
	_, err := Load(file, []string{"CARREL_GATEWAY_NOPE=1", "CARREL_GATEWAY_SCHEDULER_TICK=soon"}, nil)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"gateway.yaml:1: unknown setting lisen", "gateway.yaml:3: stop.grace must be a duration", "images.allow: \"all\" must be one of any, registries, catalogue",
		"gateway.yaml:6: unknown setting images.registres", "gateway.yaml:8: limits.gpus_per_user must be a whole number", "tls.cert_file and tls.key_file belong together",
		"gateway.yaml:11: mounts must be a list of mounts", "CARREL_GATEWAY_NOPE is no setting", "CARREL_GATEWAY_SCHEDULER_TICK",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("missing %q in:\n%v", want, err)
		}
	}
}

func TestHostsAreNamesAndNothingElse(t *testing.T) {
	cfg, err := Load(write(t, "hosts: [carrel.example.org, 192.0.2.7, \"2001:db8::7\", \"[2001:db8::8]\"]\n"), nil, nil)
	if err != nil || len(cfg.Hosts) != 4 {
		t.Errorf("%v, %v", cfg.Hosts, err)
	}
	for _, bad := range []string{"https://carrel.example.org", "carrel.example.org:443", "carrel.example.org/", "*.example.org", "a b", "user@host", "[::1]:7", "host:"} {
		if _, err := Load("", []string{"CARREL_GATEWAY_HOSTS=" + bad}, nil); err == nil || !strings.Contains(err.Error(), "hosts") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestTruncatedFilesNeverPanicAndNeverHalfLoad(t *testing.T) {
	whole := "listen: 127.0.0.1:9\nstop:\n  grace: 1s\nmounts:\n  - {name: data, path: /srv/data}\n"
	for n := range whole {
		cfg, err := Load(write(t, whole[:n]), nil, nil)
		if err != nil && cfg.Listen != "" {
			t.Errorf("cut at %d: an error and settings", n)
		}
	}
}

func TestPlainHTTPOnlyOnLoopbackUnlessAskedFor(t *testing.T) {
	for listen, want := range map[string]bool{"127.0.0.1:1": true, "[::1]:1": true, "localhost:1": true, "0.0.0.0:1": false, ":1": false, "192.0.2.1:1": false} {
		cfg, err := Load("", []string{"CARREL_GATEWAY_LISTEN=" + listen}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if cfg.PlainHTTP() != want {
			t.Errorf("%s: plain = %t", listen, cfg.PlainHTTP())
		}
	}
}
