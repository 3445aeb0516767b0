package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/spf13/viper"
)

// Settings are a person's own choices: config.yaml, over it CARREL_* (a dot becomes `_`), over it flags.
type Settings struct {
	Deployment string  `mapstructure:"deployment"` // local name; empty: the default one
	Output     string  `mapstructure:"output"`     // table, json or csv
	Project    string  `mapstructure:"project"`    // for `up`
	Up         Up      `mapstructure:"up"`
	Timeout    Timeout `mapstructure:"timeout"`
}

// Up holds what `up` takes where a flag does not say otherwise, in the flags' own forms. Empty: the deployment's defaults.
type Up struct {
	GPU    string `mapstructure:"gpu"`
	Image  string `mapstructure:"image"`
	Pool   string `mapstructure:"pool"`
	CPUs   string `mapstructure:"cpus"`
	Memory string `mapstructure:"memory"`
	SHM    string `mapstructure:"shm"`
	PIDs   string `mapstructure:"pids"`
}

// Timeout holds the limits of waiting.
type Timeout struct {
	Connect   time.Duration `mapstructure:"connect"`   // until a connection stands
	Request   time.Duration `mapstructure:"request"`   // of one call
	Reconnect time.Duration `mapstructure:"reconnect"` // for how long a watch may be without a gateway before it gives up
	Silence   time.Duration `mapstructure:"silence"`   // after which a watch counts as dead (the gateway speaks every 15 s)
	Drain     time.Duration `mapstructure:"drain"`     // of `proxy`: for the far end's last bytes after stdin ended
}

var defaults = map[string]any{
	"deployment": "", "output": "table", "project": "",
	"up.gpu": "", "up.image": "", "up.pool": "", "up.cpus": "", "up.memory": "", "up.shm": "", "up.pids": "",
	"timeout.connect": 10 * time.Second, "timeout.request": 30 * time.Second, "timeout.reconnect": 5 * time.Minute,
	"timeout.silence": 45 * time.Second, "timeout.drain": 10 * time.Second,
}

// Keys returns the names of all settings, sorted.
func Keys() []string {
	keys := make([]string, 0, len(defaults))
	for k := range defaults {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

// Env returns the environment variable of a setting.
func Env(key string) string { return "CARREL_" + strings.ToUpper(strings.ReplaceAll(key, ".", "_")) }

// Settings reads the settings. It is strict: unknown keys and wrong types fail, all faults in one error.
func (d Dir) Settings(getenv func(string) string) (Settings, error) {
	v := viper.New()
	for key, value := range defaults {
		v.SetDefault(key, value)
	}
	var faults []error
	path := filepath.Join(string(d), SettingsFile)
	content, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Settings{}, fmt.Errorf("settings: %w", err)
	}
	if err == nil {
		v.SetConfigType("yaml")
		if err := v.ReadConfig(bytes.NewReader(content)); err != nil {
			return Settings{}, fmt.Errorf("%s: %w", path, err)
		}
		faults = append(faults, unknownKeys(v, path)...)
	}
	for key := range defaults {
		if value := getenv(Env(key)); value != "" {
			v.Set(key, value)
		}
	}
	s := Settings{}
	if err := v.Unmarshal(&s, strictTypes); err != nil {
		faults = append(faults, fmt.Errorf("%s or CARREL_*: %w", path, err))
	}
	faults = append(faults, s.faults()...)
	return s, errors.Join(faults...)
}

func strictTypes(c *mapstructure.DecoderConfig) {
	c.WeaklyTypedInput = true // numbers for cpus, pids and gpu
	c.DecodeHook = mapstructure.StringToTimeDurationHookFunc()
}

func unknownKeys(v *viper.Viper, path string) []error {
	var faults []error
	keys := v.AllKeys()
	sort.Strings(keys)
	for _, key := range keys {
		if _, ok := defaults[key]; !ok {
			faults = append(faults, fmt.Errorf("%s: unknown key %q; known are %s", path, key, strings.Join(Keys(), ", ")))
		}
	}
	return faults
}

func (s Settings) faults() []error {
	var faults []error
	if s.Output != "table" && s.Output != "json" && s.Output != "csv" {
		faults = append(faults, fmt.Errorf("output: %q: use table, json or csv", s.Output))
	}
	for name, d := range map[string]time.Duration{
		"connect": s.Timeout.Connect, "request": s.Timeout.Request, "reconnect": s.Timeout.Reconnect,
		"silence": s.Timeout.Silence, "drain": s.Timeout.Drain,
	} {
		if d <= 0 {
			faults = append(faults, fmt.Errorf("timeout.%s: %v: must be more than 0, such as `30s`", name, d))
		}
	}
	return faults
}
