package config

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/viper"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Config holds the gateway's effective settings. See the table in setting.go for what each means.
type Config struct {
	Listen, PublicURL, StateDir, Deployment, MetricsListen, CLIDir string

	Hosts []string // more names of the public port

	TLSCertFile, TLSKeyFile string
	TLSNames                []string
	DangerousPlainHTTP      bool

	ImagesAllow      string
	ImagesRegistries []string
	ImagesDefault    string
	Mounts           []fleet.DeclaredMount

	GPUsPerUser, WorkspacesPerUser, StreamsPerUser int

	ReserveAfter, Tick, SampleInterval, StopGrace      time.Duration
	TokenLife, SignInLife, JoinLife, TicketLife        time.Duration
	LinkPing, LinkPingTimeout                          time.Duration
	StreamWriteTimeout, StreamOpenTimeout, CallTimeout time.Duration
	ShutdownGrace, BusyTimeout                         time.Duration
	LogLevel, LogFormat                                string

	values map[string]any
}

func fill(v *viper.Viper) Config {
	mounts, _ := v.Get("mounts").([]fleet.DeclaredMount) // the default is an empty list of another type
	cfg := Config{
		Listen: v.GetString("listen"), PublicURL: strings.TrimSuffix(v.GetString("public_url"), "/"), StateDir: v.GetString("state"),
		Deployment: v.GetString("deployment"), MetricsListen: v.GetString("metrics_listen"), CLIDir: v.GetString("cli_dir"),
		Hosts:       v.GetStringSlice("hosts"),
		TLSCertFile: v.GetString("tls.cert_file"), TLSKeyFile: v.GetString("tls.key_file"), TLSNames: v.GetStringSlice("tls.names"),
		DangerousPlainHTTP: v.GetBool("dangerous_plain_http"),
		ImagesAllow:        v.GetString("images.allow"), ImagesRegistries: v.GetStringSlice("images.registries"), ImagesDefault: v.GetString("images.default"),
		Mounts:      mounts,
		GPUsPerUser: v.GetInt("limits.gpus_per_user"), WorkspacesPerUser: v.GetInt("limits.workspaces_per_user"), StreamsPerUser: v.GetInt("limits.streams_per_user"),
		ReserveAfter: v.GetDuration("scheduler.reserve_after"), Tick: v.GetDuration("scheduler.tick"),
		SampleInterval: v.GetDuration("samples.interval"), StopGrace: v.GetDuration("stop.grace"),
		TokenLife: v.GetDuration("token.life"), SignInLife: v.GetDuration("sign_in.life"), JoinLife: v.GetDuration("join.life"), TicketLife: v.GetDuration("ticket.life"),
		LinkPing: v.GetDuration("link.ping"), LinkPingTimeout: v.GetDuration("link.ping_timeout"),
		StreamWriteTimeout: v.GetDuration("stream.write_timeout"), StreamOpenTimeout: v.GetDuration("stream.open_timeout"), CallTimeout: v.GetDuration("call.timeout"),
		ShutdownGrace: v.GetDuration("shutdown.grace"), BusyTimeout: v.GetDuration("database.busy_timeout"),
		LogLevel: v.GetString("log.level"), LogFormat: v.GetString("log.format"),
		values: map[string]any{},
	}
	if cfg.StateDir == "" {
		cfg.StateDir = defaultStateDir()
	}
	for _, s := range settings() {
		cfg.values[s.key] = v.Get(s.key)
	}
	return cfg
}

// Loopback reports whether the public port can be reached from this machine only.
func (c *Config) Loopback() bool {
	host, _, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || (ip != nil && ip.IsLoopback())
}

// PlainHTTP reports whether the gateway serves without TLS: on loopback without a certificate of its own, or where the admin takes the risk.
func (c *Config) PlainHTTP() bool {
	return c.DangerousPlainHTTP || (c.Loopback() && c.TLSCertFile == "")
}

// BaseURL returns the URL as clients reach it; port is the one that was bound.
func (c *Config) BaseURL(bound string) string {
	if c.PublicURL != "" {
		return c.PublicURL
	}
	scheme := "https"
	if c.PlainHTTP() {
		scheme = "http"
	}
	host, port, err := net.SplitHostPort(bound)
	if err != nil {
		return scheme + "://" + bound
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		if name, err := os.Hostname(); err == nil {
			host = name
		}
	}
	return (&url.URL{Scheme: scheme, Host: net.JoinHostPort(host, port)}).String()
}

func (c *Config) crossCheck() []error {
	var faults []error
	if (c.TLSCertFile == "") != (c.TLSKeyFile == "") {
		faults = append(faults, fmt.Errorf("tls.cert_file and tls.key_file belong together: set both or none"))
	}
	if c.PublicURL != "" && c.PlainHTTP() != strings.HasPrefix(c.PublicURL, "http://") && !c.Loopback() {
		faults = append(faults, fmt.Errorf("public_url %s does not fit: the gateway would serve %s", c.PublicURL, map[bool]string{true: "plain HTTP", false: "TLS"}[c.PlainHTTP()]))
	}
	if c.ImagesAllow == "registries" && len(c.ImagesRegistries) == 0 {
		faults = append(faults, fmt.Errorf("images.allow is registries, but images.registries names none"))
	}
	return faults
}

func defaultStateDir() string {
	if os.Geteuid() == 0 {
		return "/var/lib/carrel"
	}
	if dir := os.Getenv("XDG_STATE_HOME"); dir != "" {
		return filepath.Join(dir, "carrel")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "carrel-state"
	}
	return filepath.Join(home, ".local", "state", "carrel")
}

func printable(value any) any {
	switch v := value.(type) {
	case time.Duration:
		return v.String()
	case []fleet.DeclaredMount:
		list := make([]map[string]any, 0, len(v))
		for _, m := range v {
			list = append(list, map[string]any{"name": m.Name, "path": m.HostPath, "read_only": m.ReadOnly, "public": m.Public})
		}
		return list
	}
	return value
}
