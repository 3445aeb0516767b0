package config

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"
)

// Config holds the agent's effective settings; the table in setting.go says what each means.
type Config struct {
	DataDir, Name, InitFile, PolicyFile string
	PolicyNamed                         bool // the policy file was named, so it must be there
	GPUs                                string
	NVMLLibrary                         string
	NVMLTimeout, GPUProof               time.Duration
	GPUInventoryAge                     time.Duration
	DangerousPlainHTTP                  bool

	EngineHost, EngineNetwork           string
	EngineCallTimeout, EngineSlow       time.Duration
	EngineLogSize                       string
	EngineLogFiles, OpenFiles           int
	List, Heartbeat, Facts, Ready       time.Duration
	PullStall                           time.Duration
	LinkStreams                         int
	LinkDialTimeout, LinkBackoff, Write time.Duration
	LogLevel, LogFormat                 string
}

// Flags defines a flag for every setting and returns where `--NAME` of the settings file ends up; call Load after Parse.
// Settings in skip get no flag, where another program has one of that name.
func Flags(fs *flag.FlagSet, name string, skip ...string) (file *string) {
	for _, s := range settings() {
		switch {
		case slices.Contains(skip, s.key):
		case s.kind == kindBool:
			fs.Bool(s.flag(), false, s.doc)
		default:
			fs.String(s.flag(), "", s.doc)
		}
	}
	return fs.String(name, "", "the agent's settings file (YAML)")
}

// Load reads defaults, the file (none when empty), the environment and the flags that were set, and checks everything. The
// error lists every fault, with file and line where it has them.
func Load(file string, environ []string, fs *flag.FlagSet) (Config, error) {
	v := viper.New()
	table := settings()
	for _, s := range table {
		v.SetDefault(s.key, s.def)
	}
	faults := readFile(v, table, file)
	faults = append(faults, readEnvironment(v, table, environ)...)
	faults = append(faults, readFlags(v, table, fs)...)
	for _, s := range table {
		if s.check == nil {
			continue
		}
		if err := s.check(v.Get(s.key)); err != nil {
			faults = append(faults, fmt.Errorf("%s: %q %w", s.key, fmt.Sprint(v.Get(s.key)), err))
		}
	}
	if len(faults) > 0 {
		return Config{}, errors.Join(faults...)
	}
	return fill(v), nil
}

func fill(v *viper.Viper) Config {
	c := Config{
		DataDir: v.GetString("data"), Name: v.GetString("name"), InitFile: v.GetString("init_file"), PolicyFile: v.GetString("policy_file"),
		PolicyNamed: v.GetString("policy_file") != DefaultPolicyFile, GPUs: v.GetString("gpus"),
		NVMLLibrary: v.GetString("nvml.library"), NVMLTimeout: v.GetDuration("nvml.timeout"), GPUProof: v.GetDuration("gpu.proof"), GPUInventoryAge: v.GetDuration("gpu.inventory_age"),
		DangerousPlainHTTP: v.GetBool("dangerous_plain_http"),
		EngineHost:         v.GetString("engine.host"), EngineNetwork: v.GetString("engine.network"),
		EngineCallTimeout: v.GetDuration("engine.call_timeout"), EngineSlow: v.GetDuration("engine.slow_timeout"),
		EngineLogSize: v.GetString("engine.log_size"), EngineLogFiles: v.GetInt("engine.log_files"), OpenFiles: v.GetInt("limits.open_files"),
		List: v.GetDuration("times.list"), Heartbeat: v.GetDuration("times.heartbeat"), Facts: v.GetDuration("times.facts"),
		Ready: v.GetDuration("times.ready"), PullStall: v.GetDuration("pull.stall"),
		LinkStreams: v.GetInt("link.streams"), LinkDialTimeout: v.GetDuration("link.dial_timeout"), LinkBackoff: v.GetDuration("link.backoff"),
		Write: v.GetDuration("stream.write_timeout"), LogLevel: v.GetString("log.level"), LogFormat: v.GetString("log.format"),
	}
	if c.DataDir == "" {
		c.DataDir = defaultDataDir()
	}
	return c
}

func defaultDataDir() string {
	if os.Geteuid() == 0 {
		return "/var/lib/carrel-agent"
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "carrel-agent")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return filepath.Join(os.TempDir(), fmt.Sprintf("carrel-agent-%d", os.Geteuid()))
	}
	return filepath.Join(home, ".local", "state", "carrel-agent")
}

func readFile(v *viper.Viper, table []setting, file string) []error {
	if file == "" {
		return nil
	}
	content, err := os.ReadFile(file)
	if err != nil {
		return []error{fmt.Errorf("settings file: %w", err)}
	}
	var root yaml.Node
	if err := yaml.Unmarshal(content, &root); err != nil {
		return []error{fmt.Errorf("%s: %w", file, err)}
	}
	if len(root.Content) == 0 {
		return nil
	}
	return readMapping(v, table, file, "", root.Content[0])
}

func readMapping(v *viper.Viper, table []setting, file, prefix string, node *yaml.Node) []error {
	if node.Kind != yaml.MappingNode {
		return []error{fmt.Errorf("%s:%d: expected `key: value` lines", file, node.Line)}
	}
	var faults []error
	seen := map[string]bool{}
	for i := 0; i+1 < len(node.Content); i += 2 {
		name, value := node.Content[i], node.Content[i+1]
		key, at := prefix+name.Value, fmt.Sprintf("%s:%d", file, name.Line)
		if seen[key] {
			faults = append(faults, fmt.Errorf("%s: %s is set twice", at, key))
		}
		seen[key] = true
		row := slices.IndexFunc(table, func(s setting) bool { return s.key == key })
		if row < 0 {
			if slices.ContainsFunc(table, func(s setting) bool { return strings.HasPrefix(s.key, key+".") }) {
				faults = append(faults, readMapping(v, table, file, key+".", value)...)
				continue
			}
			faults = append(faults, fmt.Errorf("%s: unknown setting %s", at, key))
			continue
		}
		if err := take(v, table[row], value); err != nil {
			faults = append(faults, fmt.Errorf("%s: %s must be %s: %w", at, key, kindWords[table[row].kind], err))
		}
	}
	return faults
}

func take(v *viper.Viper, s setting, node *yaml.Node) error {
	var raw any
	err := node.Decode(&raw)
	if err == nil {
		raw, err = s.fromFile(raw)
	}
	if err == nil {
		v.Set(s.key, raw)
	}
	return err
}

func readEnvironment(v *viper.Viper, table []setting, environ []string) []error {
	var faults []error
	for _, entry := range environ {
		name, text, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(name, EnvPrefix) {
			continue
		}
		row := slices.IndexFunc(table, func(s setting) bool { return s.env() == name })
		if row < 0 {
			faults = append(faults, fmt.Errorf("environment: %s is no setting", name))
			continue
		}
		value, err := table[row].parse(text)
		if err != nil {
			faults = append(faults, fmt.Errorf("environment: %s=%q must be %s", name, text, kindWords[table[row].kind]))
			continue
		}
		v.Set(table[row].key, value)
	}
	return faults
}

func readFlags(v *viper.Viper, table []setting, fs *flag.FlagSet) []error {
	if fs == nil {
		return nil
	}
	var faults []error
	fs.Visit(func(f *flag.Flag) {
		row := slices.IndexFunc(table, func(s setting) bool { return s.flag() == f.Name })
		if row < 0 {
			return // of the program, or of another table
		}
		value, err := table[row].parse(f.Value.String())
		if err != nil {
			faults = append(faults, fmt.Errorf("--%s %q must be %s", f.Name, f.Value.String(), kindWords[table[row].kind]))
			return
		}
		v.Set(table[row].key, value)
	})
	return faults
}
