//go:build linux

package rig

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"
)

// Machine is what the figures were measured on.
type Machine struct {
	At      time.Time `json:"at"`
	Version string    `json:"version,omitempty"` // of the programs under test
	Commit  string    `json:"commit"`            // of the checkout
	Cores   int       `json:"cores"`
	CPU     string    `json:"cpu"`
	AES     bool      `json:"aes"`
	Kernel  string    `json:"kernel"`
	Go      string    `json:"go"`
	OpenSSH string    `json:"openssh"`
	Docker  string    `json:"docker,omitempty"`
	Load    string    `json:"load_before"`
}

// ThisMachine describes the machine; engine may be nil.
func ThisMachine(ctx context.Context, engine *Engine) Machine {
	m := Machine{At: time.Now().UTC().Truncate(time.Second), Cores: runtime.NumCPU(), Go: runtime.Version()}
	m.Commit = firstLine(exec.CommandContext(ctx, "git", "describe", "--always", "--dirty"))
	m.Kernel = firstLine(exec.CommandContext(ctx, "uname", "-sr"))
	m.OpenSSH = firstLine(exec.CommandContext(ctx, "ssh", "-V"))
	if engine != nil {
		m.Docker, _ = engine.Version(ctx) // the benches that need it say what is missing
	}
	if load, err := os.ReadFile("/proc/loadavg"); err == nil {
		m.Load = strings.Join(strings.Fields(string(load))[:3], " ")
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return m
	}
	for line := range strings.Lines(string(info)) {
		key, value, _ := strings.Cut(line, ":")
		switch strings.TrimSpace(key) {
		case "model name":
			m.CPU = strings.TrimSpace(value)
		case "flags", "Features": // amd64, arm64
			m.AES = strings.Contains(" "+value+" ", " aes ")
		}
	}
	return m
}

func firstLine(cmd *exec.Cmd) string {
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "unknown"
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(line)
}

func (m Machine) String() string {
	aes := "no AES instructions"
	if m.AES {
		aes = "AES instructions"
	}
	docker := m.Docker
	if docker == "" {
		docker = "none"
	}
	version := "commit " + m.Commit
	if m.Version != "" {
		version = "programs " + m.Version
	}
	return fmt.Sprintf("%s, %s: %d cores (%s, %s), %s, %s, %s, Docker %s, load %s before the run",
		m.At.Format("2006-01-02 15:04 UTC"), version, m.Cores, m.CPU, aes, m.Kernel, m.Go, m.OpenSSH, docker, m.Load)
}
