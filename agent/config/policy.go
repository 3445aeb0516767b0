package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/carrel-dev/carrel/agent/host"
)

// DefaultPolicyFile is where a host's policy lies.
const DefaultPolicyFile = "/etc/carrel/host-policy.yaml"

// Policy reads a host's policy file, which belongs to root. A file that was not named need not be there. All faults are
// reported together, with their lines.
func Policy(file string, named bool) (host.Policy, error) {
	err := host.CheckOwner(file)
	if errors.Is(err, fs.ErrNotExist) && !named {
		return host.Policy{}, nil
	}
	var content []byte
	if err == nil {
		content, err = os.ReadFile(file)
	}
	if err != nil {
		return host.Policy{}, fmt.Errorf("host policy file: %w", err)
	}
	p, faults := parsePolicy(file, content)
	for _, fault := range p.Check() {
		faults = append(faults, fmt.Errorf("%s: %s", file, fault))
	}
	return p, errors.Join(faults...)
}

// policyReader collects what a file says and what is wrong with it.
type policyReader struct {
	file   string
	policy host.Policy
	faults []error
}

func parsePolicy(file string, content []byte) (host.Policy, []error) {
	r := policyReader{file: file}
	var root yaml.Node
	if err := yaml.Unmarshal(content, &root); err != nil {
		return host.Policy{}, []error{fmt.Errorf("%s: %w", file, err)}
	}
	if len(root.Content) > 0 {
		r.each(root.Content[0], map[string]func(*yaml.Node){
			"images": func(n *yaml.Node) { r.decode(n, &r.policy.Images, "a list of image references") },
			"mounts": func(n *yaml.Node) { r.list(n, r.mount) },
			"uids":   func(n *yaml.Node) { r.list(n, r.uids) },
			"max_gpus": func(n *yaml.Node) {
				r.decode(n, &r.policy.MaxGPUs, "a whole number")
			},
			"reserve": func(n *yaml.Node) {
				r.each(n, map[string]func(*yaml.Node){
					"cpus": func(n *yaml.Node) {
						var cpus float64
						r.decode(n, &cpus, "a number of cores")
						r.policy.ReserveCPUMillis = int64(cpus * 1000)
					},
					"memory": func(n *yaml.Node) { r.policy.ReserveMemoryMiB = r.size(n) },
					"disk":   func(n *yaml.Node) { r.policy.ReserveDiskMiB = r.size(n) },
				})
			},
		})
	}
	return r.policy, r.faults
}

func (r *policyReader) fault(n *yaml.Node, format string, args ...any) {
	r.faults = append(r.faults, fmt.Errorf("%s:%d: %s", r.file, n.Line, fmt.Sprintf(format, args...)))
}

// each hands the values of a mapping to who reads them; other names are faults.
func (r *policyReader) each(n *yaml.Node, read map[string]func(*yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		r.fault(n, "expected `name: value` lines")
		return
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		name := n.Content[i].Value
		switch f, known := read[name]; {
		case !known:
			r.fault(n.Content[i], "%s is unknown here", name)
		case seen[name]:
			r.fault(n.Content[i], "%s is given twice", name)
		default:
			f(n.Content[i+1])
		}
		seen[name] = true
	}
}

func (r *policyReader) list(n *yaml.Node, each func(*yaml.Node)) {
	if n.Kind != yaml.SequenceNode {
		r.fault(n, "expected a list")
		return
	}
	for _, entry := range n.Content {
		each(entry)
	}
}

func (r *policyReader) decode(n *yaml.Node, into any, what string) {
	if err := n.Decode(into); err != nil {
		r.fault(n, "expected %s", what)
	}
}

func (r *policyReader) mount(n *yaml.Node) {
	var m host.MountRoot
	r.each(n, map[string]func(*yaml.Node){
		"path":     func(n *yaml.Node) { r.decode(n, &m.Path, "a path") },
		"writable": func(n *yaml.Node) { r.decode(n, &m.Writable, "true or false") },
	})
	r.policy.Mounts = append(r.policy.Mounts, m)
}

// uids reads `500` or `500-599`.
func (r *policyReader) uids(n *yaml.Node) {
	first, last, ranged := strings.Cut(n.Value, "-")
	if !ranged {
		last = first
	}
	a, errA := strconv.ParseInt(strings.TrimSpace(first), 10, 64)
	b, errB := strconv.ParseInt(strings.TrimSpace(last), 10, 64)
	if n.Kind != yaml.ScalarNode || errA != nil || errB != nil {
		r.fault(n, "expected a user id or a range such as 500-599")
		return
	}
	r.policy.UIDs = append(r.policy.UIDs, host.UIDRange{First: a, Last: b})
}

// size reads `2GiB` or `512MiB` as MiB.
func (r *policyReader) size(n *yaml.Node) int64 {
	for unit, mib := range map[string]int64{"MiB": 1, "GiB": 1 << 10, "TiB": 1 << 20} {
		if number, ok := strings.CutSuffix(n.Value, unit); ok {
			if v, err := strconv.ParseInt(strings.TrimSpace(number), 10, 32); err == nil && v >= 0 {
				return v * mib
			}
		}
	}
	r.fault(n, "expected a size such as 512MiB or 2GiB")
	return 0
}
