//go:build linux

package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

const (
	readyLimit = 60 * time.Second
	// upLimit bounds one verb that waits for a container; the image is present, so that it takes a second at most.
	verbLimit = 3 * time.Minute
)

// Layout says in which programs gateway and agent run.
type Layout string

// The layouts.
const (
	Dev      Layout = "dev"       // `carreld dev`: both in one process
	Split    Layout = "split"     // `carreld gateway` and `carreld agent`, plain HTTP on loopback
	SplitTLS Layout = "split-tls" // the same with TLS between CLI and gateway and between gateway and agent
)

// Programs are the paths of the programs under test.
type Programs struct{ Carreld, Carrel string }

// BinDir is where the programs under test are: CARREL_TEST_BIN, or bin in a checkout.
func BinDir() string {
	if dir := os.Getenv("CARREL_TEST_BIN"); dir != "" {
		return dir
	}
	return "bin"
}

// FindPrograms looks for all programs in a directory and names the ones that are missing.
func FindPrograms(dir string) (Programs, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return Programs{}, err
	}
	p := Programs{Carreld: filepath.Join(dir, "carreld"), Carrel: filepath.Join(dir, "carrel")}
	var absent []string
	for _, path := range []string{p.Carreld, p.Carrel, filepath.Join(dir, "carrel-init")} {
		if info, err := os.Stat(path); err != nil || info.Mode()&0o111 == 0 {
			absent = append(absent, path)
		}
	}
	if len(absent) > 0 {
		return p, fmt.Errorf("not there or not executable: %s: run `make build` first, or name another directory with -bin", strings.Join(absent, ", "))
	}
	return p, nil
}

// Version returns what carreld says of itself: the commit that it was built from, by `make build`.
func (p Programs) Version(ctx context.Context) (string, error) {
	out, _, err := Run{}.Do(ctx, []string{p.Carreld, "version"})
	return strings.TrimSpace(out), err
}

// Carrel is a deployment of its own in a directory: gateway, agent and a signed-in CLI.
type Carrel struct {
	Gateway, Agent *Process // the same process in the layout Dev
	Layout         Layout
	URL            string
	MetricsURL     string

	programs Programs
	dir      string
	env      []string
	http     *http.Client
	listen   string
	metrics  string
	tls      *certificate
}

// StartCarrel starts a fresh deployment in dir and signs in as its first admin.
func StartCarrel(ctx context.Context, programs Programs, layout Layout, dir string) (*Carrel, error) {
	c := &Carrel{Layout: layout, programs: programs, dir: dir, http: &http.Client{Timeout: 5 * time.Second}}
	if err := c.prepare(); err != nil {
		return nil, err
	}
	err := c.StartGateway(ctx)
	if err == nil {
		err = c.signIn(ctx)
	}
	if err == nil && layout != Dev {
		err = c.joinAgent(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, c.Stop())
	}
	return c, nil
}

func (c *Carrel) prepare() error {
	for _, d := range []string{"gateway", "agent", "cli", "ssh"} {
		if err := os.MkdirAll(filepath.Join(c.dir, d), 0o700); err != nil {
			return err
		}
	}
	c.env = []string{
		"CARREL_CONFIG_DIR=" + filepath.Join(c.dir, "cli"), "CARREL_SSH_CONFIG=" + filepath.Join(c.dir, "ssh", "config"),
		"CARREL_TOKEN=", "CARREL_GATEWAY=", "CARREL_DEPLOYMENT=",
	}
	var ports [2]string
	for i := range ports {
		port, err := FreePort()
		if err != nil {
			return err
		}
		ports[i] = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	}
	c.listen, c.metrics = ports[0], ports[1]
	c.URL, c.MetricsURL = "http://"+c.listen, "http://"+c.metrics+"/metrics"
	if c.Layout != SplitTLS {
		return nil
	}
	var err error
	if c.tls, err = newCertificate(c.dir); err != nil {
		return err
	}
	c.URL = "https://" + c.listen
	c.env = append(c.env, "SSL_CERT_FILE="+c.tls.certFile)
	c.http.Transport = &http.Transport{TLSClientConfig: c.tls.client}
	return nil
}

// StartGateway starts the gateway, or in the layout Dev both, and waits until it is ready.
func (c *Carrel) StartGateway(ctx context.Context) error {
	verb := "gateway"
	if c.Layout == Dev {
		verb = "dev"
	}
	argv := []string{c.programs.Carreld, verb, "--state", filepath.Join(c.dir, "gateway"), "--listen", c.listen, "--metrics-listen", c.metrics}
	if c.Layout != Dev {
		argv = append(argv, "--images-allow", "any")
	}
	if c.tls != nil {
		argv = append(argv, "--tls-cert-file", c.tls.certFile, "--tls-key-file", c.tls.keyFile)
	}
	p, err := Start("carreld "+verb, filepath.Join(c.dir, verb+".log"), c.env, argv...)
	if err != nil {
		return err
	}
	c.Gateway = p
	if c.Layout == Dev {
		c.Agent = p
	}
	return p.WaitHTTP(ctx, c.http, c.URL+"/readyz", readyLimit)
}

// loginLine is how a gateway prints the first admin's link.
var loginLine = regexp.MustCompile(`carrel login '([^']+)'`)

func (c *Carrel) signIn(ctx context.Context) error {
	file := filepath.Join(c.dir, "gateway", "sign-in")
	text, err := os.ReadFile(file)
	link := strings.TrimSpace(string(text))
	if errors.Is(err, fs.ErrNotExist) {
		if text, err = os.ReadFile(c.Gateway.Log); err == nil {
			if match := loginLine.FindSubmatch(text); match != nil {
				link = string(match[1])
			}
		}
	}
	if err != nil {
		return err
	}
	if link == "" {
		return fmt.Errorf("no sign-in link in %s or %s, although the gateway is ready at its first start", file, c.Gateway.Log)
	}
	_, _, err = c.CLI(ctx, "login", link)
	return err
}

// joinAgent starts an agent with a join token and waits until its devices are there.
func (c *Carrel) joinAgent(ctx context.Context) error {
	token, _, err := c.CLI(ctx, "host", "token")
	if err != nil {
		return err
	}
	if err := c.startAgent("--join", strings.TrimSpace(token)); err != nil {
		return err
	}
	return c.WaitDevices(ctx)
}

// StartAgent starts the agent again, with the identity that it has.
func (c *Carrel) StartAgent() error { return c.startAgent() }

func (c *Carrel) startAgent(more ...string) (err error) {
	argv := []string{c.programs.Carreld, "agent", "--data", filepath.Join(c.dir, "agent"), "--gpus", "simulated:4x4090"}
	c.Agent, err = Start("carreld agent", filepath.Join(c.dir, "agent.log"), c.env, append(argv, more...)...)
	return err
}

// WaitDevices waits until the gateway knows at least one device, so that a workspace does not queue for it.
func (c *Carrel) WaitDevices(ctx context.Context) error {
	var last error
	err := Poll(ctx, readyLimit, func(ctx context.Context) (bool, error) {
		if !c.Agent.Running() {
			return false, fmt.Errorf("%s ended; its last lines:\n%s", c.Agent.Name, c.Agent.Tail())
		}
		out, _, err := c.CLI(ctx, "gpus", "-q")
		last = err
		return err == nil && strings.TrimSpace(out) != "", nil
	})
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return errors.Join(fmt.Errorf("no device appeared within %v; the agent's last lines:\n%s", readyLimit, c.Agent.Tail()), last)
	}
	return err
}

// Argv returns the command line of a verb, for programs that are started elsewhere with Env.
func (c *Carrel) Argv(args ...string) []string { return append([]string{c.programs.Carrel}, args...) }

// Env is what the CLI needs beside this program's environment.
func (c *Carrel) Env() []string { return c.env }

// CLI runs a verb and returns its output and how long it took, the program's own start included.
func (c *Carrel) CLI(ctx context.Context, args ...string) (string, time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, verbLimit)
	defer cancel()
	return Run{Env: c.env}.Do(ctx, c.Argv(args...))
}

// Path returns the way to a workspace by plain ssh with the managed configuration.
func (c *Carrel) Path(name string) Path {
	return Path{
		Name: "carrel", Config: filepath.Join(c.dir, "ssh", "carrel", "config"), Host: name + ".carrel",
		Dir: "/dev/shm", Env: c.env,
	}
}

// Workspace is what `show` says about one, as far as it is used here.
type Workspace struct {
	ID, Name, State string
	Run             *struct{ Epoch int64 }
	Leases          []struct {
		ID        string     `json:"id"`
		StartedAt *time.Time `json:"started_at"`
		EndedAt   *time.Time `json:"ended_at"`
	}
}

// Show returns a workspace.
func (c *Carrel) Show(ctx context.Context, name string) (Workspace, error) {
	out, _, err := c.CLI(ctx, "show", name, "-o", "json")
	if err != nil {
		return Workspace{}, err
	}
	var w Workspace
	if err := json.Unmarshal([]byte(out), &w); err != nil {
		return Workspace{}, fmt.Errorf("`carrel show -o json`: %w", err)
	}
	return w, nil
}

// Container returns the container of a workspace's run.
func (c *Carrel) Container(ctx context.Context, e *Engine, name string) (Container, error) {
	w, err := c.Show(ctx, name)
	if err != nil {
		return Container{}, err
	}
	found, err := e.Containers(ctx, "carrel-"+w.ID+"-")
	if err != nil {
		return Container{}, err
	}
	for _, f := range found {
		if f.PID != 0 {
			return f, nil
		}
	}
	return Container{}, fmt.Errorf("no container of workspace %s (%s) runs", name, w.ID)
}

// RemoveAll removes all workspaces, and then, also where the gateway does not answer, whatever the engine has of them; it
// names the containers. Volumes stay restorable for days after a delete, so that those are taken away without being named.
func (c *Carrel) RemoveAll(ctx context.Context, e *Engine) (left []string, err error) {
	faults := []error{c.removeWorkspaces(ctx)}
	volumes, err := e.VolumesUnder(ctx, c.dir)
	faults = append(faults, err)
	for _, v := range volumes {
		found, err := e.Using(ctx, v)
		faults = append(faults, err)
		for _, f := range found {
			left = append(left, "container "+f.Name)
			faults = append(faults, e.Remove(ctx, f.ID))
		}
		faults = append(faults, e.RemoveVolume(ctx, v))
	}
	return left, errors.Join(faults...)
}

func (c *Carrel) removeWorkspaces(ctx context.Context) error {
	out, _, err := c.CLI(ctx, "ls", "-o", "json")
	if err != nil {
		return err
	}
	var list []Workspace
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return fmt.Errorf("`carrel ls -o json`: %w", err)
	}
	var faults []error
	for _, w := range list {
		_, _, err := c.CLI(ctx, "rm", w.ID, "--volume", "--yes")
		faults = append(faults, err)
	}
	return errors.Join(faults...)
}

// Stop ends agent and gateway.
func (c *Carrel) Stop() error {
	var faults []error
	for i, p := range []*Process{c.Agent, c.Gateway} {
		if p == nil || (i == 1 && p == c.Agent) {
			continue
		}
		faults = append(faults, p.Stop())
	}
	return errors.Join(faults...)
}
