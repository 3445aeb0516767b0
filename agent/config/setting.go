// Package config reads the agent's settings and its host's policy file: strict, with all faults reported together.
package config

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/carrel-dev/carrel/agent/gpu"
)

// EnvPrefix begins the name of each environment variable: `engine.host` is CARREL_AGENT_ENGINE_HOST.
const EnvPrefix = "CARREL_AGENT_"

type kind uint8

const (
	kindString kind = iota
	kindBool
	kindInt
	kindDuration
)

var kindWords = [...]string{"text", "true or false", "a whole number", "a duration such as 10s"}

// setting is one row of the table.
type setting struct {
	key   string
	kind  kind
	def   any
	doc   string
	check func(value any) error
}

// settings is the whole table, in the order in which it is shown.
func settings() []setting {
	return []setting{
		{key: "data", def: "", doc: "directory of identity, journal and volumes; empty: /var/lib/carrel-agent as root, else ~/.local/state/carrel-agent", check: emptyOrAbsolute},
		{key: "name", def: "", doc: "name of this host when it joins; empty: the machine's host name"},
		{key: "init_file", def: "", doc: "carrel-init; empty: beside carreld", check: emptyOrAbsolute},
		{key: "policy_file", def: DefaultPolicyFile, doc: "what this host allows any gateway to ask; belongs to root", check: absolute},
		{key: "gpus", def: "auto", doc: "auto, nvml, none, or simulated:LIST such as simulated:4x4090", check: gpuSource},
		{key: "nvml.library", def: "", doc: "the NVIDIA driver's library; empty: libnvidia-ml.so.1"},
		{key: "nvml.timeout", kind: kindDuration, def: gpu.DefaultDeviceLimit, doc: "wait for the driver's answer about one GPU", check: positive},
		{key: "dangerous_plain_http", kind: kindBool, def: false, doc: "let the gateway be plain HTTP beyond this machine: whoever can read the network can take over the host's workspaces"},
		{key: "engine.host", def: "unix:///var/run/docker.sock", doc: "address of the container engine"},
		{key: "engine.network", def: "carrel", doc: "the engine's bridge that all workspaces are on", check: notEmpty},
		{key: "engine.call_timeout", kind: kindDuration, def: 10 * time.Second, doc: "wait for the engine's answer", check: positive},
		{key: "engine.slow_timeout", kind: kindDuration, def: time.Minute, doc: "wait for it to make, start or remove a container", check: positive},
		{key: "engine.log_size", def: "10m", doc: "size of one log file of a workspace's first process", check: notEmpty},
		{key: "engine.log_files", kind: kindInt, def: 3, doc: "log files that are kept of it", check: atLeast(1)},
		{key: "limits.open_files", kind: kindInt, def: 1 << 20, doc: "open files of one process in a workspace, as far as the engine gives them", check: atLeast(1024)},
		{key: "times.list", kind: kindDuration, def: 15 * time.Second, doc: "time between two full comparisons with the engine", check: positive},
		{key: "times.heartbeat", kind: kindDuration, def: 10 * time.Second, doc: "time between two notes on disk that a workspace was seen to run", check: positive},
		{key: "times.facts", kind: kindDuration, def: 5 * time.Second, doc: "time between two looks at the host", check: positive},
		{key: "times.ready", kind: kindDuration, def: time.Minute, doc: "wait for carrel-init inside after the start", check: positive},
		{key: "pull.stall", kind: kindDuration, def: 3 * time.Minute, doc: "longest time without progress in a pull", check: positive},
		{key: "gpu.inventory_age", kind: kindDuration, def: 10 * time.Second, doc: "how long one look at the devices is good for; samples are always taken anew", check: positive},
		{key: "gpu.proof", kind: kindDuration, def: gpu.DefaultProof, doc: "how long a device that failed must answer well before it is given out again", check: positive},
		{key: "link.streams", kind: kindInt, def: 4, doc: "byte-stream connections kept ready", check: atLeast(1)},
		{key: "link.dial_timeout", kind: kindDuration, def: 5 * time.Second, doc: "wait for the gateway to take a connection", check: positive},
		{key: "link.backoff", kind: kindDuration, def: 8 * time.Second, doc: "longest pause between two tries to reach the gateway", check: positive},
		{key: "stream.write_timeout", kind: kindDuration, def: 30 * time.Second, doc: "time without progress after which a byte stream is given up", check: positive},
		{key: "log.level", def: "info", doc: "debug, info, warn or error", check: oneOf("debug", "info", "warn", "error")},
		{key: "log.format", def: "text", doc: "text or json", check: oneOf("text", "json")},
	}
}

func (s setting) env() string {
	return EnvPrefix + strings.ToUpper(strings.NewReplacer(".", "_").Replace(s.key))
}

// flag is the setting's flag, without dashes.
func (s setting) flag() string { return strings.NewReplacer(".", "-", "_", "-").Replace(s.key) }

// parse turns a text of the environment or a flag into the setting's type.
func (s setting) parse(text string) (any, error) {
	switch s.kind {
	case kindString:
		return text, nil
	case kindBool:
		return strconv.ParseBool(text)
	case kindInt:
		return strconv.Atoi(text)
	case kindDuration:
		return time.ParseDuration(text)
	}
	return nil, fmt.Errorf("unknown kind")
}

// fromFile turns a value that YAML gave into the setting's type: no number for a text, no text for a number.
func (s setting) fromFile(value any) (any, error) {
	switch v := value.(type) {
	case string:
		if s.kind == kindString {
			return v, nil
		}
		if s.kind == kindDuration {
			return time.ParseDuration(v)
		}
	case bool:
		if s.kind == kindBool {
			return v, nil
		}
	case int:
		if s.kind == kindInt {
			return v, nil
		}
	}
	return nil, fmt.Errorf("is %T", value)
}

func emptyOrAbsolute(value any) error {
	if value == "" {
		return nil
	}
	return absolute(value)
}

func absolute(value any) error {
	if text, _ := value.(string); !filepath.IsAbs(text) {
		return fmt.Errorf("must be an absolute path")
	}
	return nil
}

func notEmpty(value any) error {
	if value == "" {
		return fmt.Errorf("must not be empty")
	}
	return nil
}

func positive(value any) error {
	if d, _ := value.(time.Duration); d <= 0 {
		return fmt.Errorf("must be more than 0s")
	}
	return nil
}

func atLeast(least int) func(any) error {
	return func(value any) error {
		if n, _ := value.(int); n < least {
			return fmt.Errorf("must be %d or more", least)
		}
		return nil
	}
}

func oneOf(words ...string) func(any) error {
	return func(value any) error {
		if text, _ := value.(string); !slices.Contains(words, text) {
			return fmt.Errorf("must be one of %s", strings.Join(words, ", "))
		}
		return nil
	}
}

// gpuSource tries a simulated list at once, so that a wrong one is told with the other faults.
func gpuSource(value any) error {
	text, _ := value.(string)
	if list, ok := strings.CutPrefix(text, "simulated:"); ok {
		_, err := gpu.Simulated(gpu.SimulatedConfig{Host: "check", Spec: list, Now: time.Now})
		return err
	}
	return oneOf("auto", "nvml", "none")(value)
}
