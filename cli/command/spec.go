package command

import (
	"fmt"
	"math"
	"path"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/config"
	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

const maxGPUs = 1024 // as GpuRequest.count

// specFlags are the flags of `up` and `update` that say what a workspace gets.
type specFlags struct {
	gpu, image, pool, cpus, memory, shm, pids string
	env, volumes                              []string
	unsetEnv, unsetVolumes                    []string
}

func (f *specFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.gpu, "gpu", "", "`[MODEL[|MODEL]:]COUNT`, or MODEL, or none (default: one of any model)")
	fl.StringVar(&f.image, "image", "", "catalogue `NAME`, or a reference that policy allows")
	fl.StringVar(&f.pool, "pool", "", "pool `NAME`")
	fl.StringVar(&f.cpus, "cpus", "", "`CORES`, such as 4 or 0.5")
	fl.StringVar(&f.memory, "memory", "", "`SIZE`, such as 64GiB (default: the host's share per GPU)")
	fl.StringVar(&f.shm, "shm", "", "`SIZE` of /dev/shm (default: half of the memory)")
	fl.StringVar(&f.pids, "pids", "", "most processes and threads, a `NUMBER`")
	fl.StringArrayVarP(&f.env, "env", "e", nil, "`NAME=VALUE` in the environment; may be given many times")
	fl.StringArrayVar(&f.volumes, "volume", nil, "`NAME:/path[:ro]`: a volume of yours, made at first use; may be given many times")
}

// specChange is what flags ask for: a spec and the names of its fields that were given.
type specChange struct {
	spec   *carrelv1.WorkspaceSpec
	fields []string
}

func (c specChange) has(field string) bool { return slices.Contains(c.fields, field) }

// parse reads the flags that were given. All faults are told together.
func (f *specFlags) parse() (specChange, error) {
	c := specChange{spec: &carrelv1.WorkspaceSpec{}}
	var faults []string
	take := func(field, value string, set func(string) error) {
		if value == "" {
			return
		}
		if err := set(value); err != nil {
			faults = append(faults, err.Error())
			return
		}
		c.fields = append(c.fields, field)
	}
	s := c.spec
	take("gpu", f.gpu, func(v string) (err error) { s.Gpu, err = parseGPU(v); return })
	take("image", f.image, func(v string) error { s.Image = v; return nil })
	take("pool", f.pool, func(v string) error { s.Pool = v; return nil })
	take("cpu_millis", f.cpus, func(v string) (err error) { s.CpuMillis, err = parseCPUs(v); return })
	take("memory_mib", f.memory, func(v string) (err error) { s.MemoryMib, err = parseSize("--memory", v); return })
	take("shm_mib", f.shm, func(v string) (err error) { s.ShmMib, err = parseSize("--shm", v); return })
	take("pids_limit", f.pids, func(v string) (err error) { s.PidsLimit, err = parseCount("--pids", v); return })
	for _, e := range f.env {
		take("env", e, func(v string) error { return addEnv(s, v) })
	}
	for _, m := range f.volumes {
		take("volumes", m, func(v string) error { return addVolume(s, v) })
	}
	slices.Sort(c.fields)
	c.fields = slices.Compact(c.fields)
	if len(faults) > 0 {
		return c, usagef("%s", strings.Join(faults, "; "))
	}
	return c, nil
}

// withDefaults adds a person's own settings where a flag says nothing.
func (f specFlags) withDefaults(up config.Up) specFlags {
	for _, p := range []struct {
		flag *string
		own  string
	}{
		{&f.gpu, up.GPU},
		{&f.image, up.Image},
		{&f.pool, up.Pool},
		{&f.cpus, up.CPUs},
		{&f.memory, up.Memory},
		{&f.shm, up.SHM},
		{&f.pids, up.PIDs},
	} {
		if *p.flag == "" {
			*p.flag = p.own
		}
	}
	return f
}

var modelPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._+-]{0,62}$`)

const gpuForm = "use COUNT, MODEL, MODEL:COUNT, MODEL|MODEL:COUNT or none, such as 2, 4090, A100-80GB:2"

// parseGPU reads `[MODEL[|MODEL]:]COUNT`, `MODEL`, `0` or `none`. Digits alone are a count up to 1,024 and a model such
// as 4090 above.
func parseGPU(s string) (*carrelv1.GpuRequest, error) {
	if s == "none" {
		return &carrelv1.GpuRequest{}, nil
	}
	models, count, hasCount := splitGPU(s)
	g := &carrelv1.GpuRequest{Count: 1}
	if hasCount {
		n, err := strconv.Atoi(count)
		if err != nil {
			return nil, fmt.Errorf("--gpu %q: %s", s, gpuForm)
		}
		if n < 0 || n > maxGPUs {
			return nil, fmt.Errorf("--gpu %q: the number of GPUs is 0 to %d", s, maxGPUs)
		}
		g.Count = int32(n)
	}
	if models == "" && !hasCount || hasCount && strings.HasPrefix(s, ":") {
		return nil, fmt.Errorf("--gpu %q: %s", s, gpuForm)
	}
	if models == "" {
		return g, nil
	}
	for m := range strings.SplitSeq(models, "|") {
		if !modelPattern.MatchString(m) {
			return nil, fmt.Errorf("--gpu %q: %q is not a model; `carrel gpus` shows them; %s", s, m, gpuForm)
		}
		g.Models = append(g.Models, m)
	}
	return g, nil
}

// splitGPU tells models and count apart.
func splitGPU(s string) (models, count string, hasCount bool) {
	if i := strings.LastIndexByte(s, ':'); i >= 0 {
		return s[:i], s[i+1:], true
	}
	if n, err := strconv.Atoi(s); err == nil && (n <= maxGPUs || n > 9999) {
		return "", s, true
	}
	return s, "", false
}

func parseCPUs(s string) (int64, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsNaN(v) || v < 0.01 || v > 100_000 {
		return 0, fmt.Errorf("--cpus %q: use a number of cores, such as 4 or 0.5", s)
	}
	return int64(math.Round(v * 1000)), nil
}

var sizePattern = regexp.MustCompile(`^([0-9]{1,12})(?:\.([0-9]{1,3}))?([KMGTkmgt])(?:i?[Bb])?$`)

// parseSize reads a size as whole MiB. Units are powers of 1,024, as `docker run` has them.
func parseSize(flag, s string) (int64, error) {
	m := sizePattern.FindStringSubmatch(s)
	if m == nil {
		return 0, fmt.Errorf("%s %q: use a number and a unit, such as 512MiB or 64G", flag, s)
	}
	v, err := strconv.ParseFloat(m[1]+"."+m[2]+"0", 64)
	if err != nil {
		return 0, fmt.Errorf("%s %q: %w", flag, s, err)
	}
	mib := v * map[string]float64{"K": 1.0 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}[strings.ToUpper(m[3])]
	if mib < 1 || mib > 1<<40 {
		return 0, fmt.Errorf("%s %q: must be 1MiB or more, and no more than a machine can have", flag, s)
	}
	return int64(math.Round(mib)), nil
}

func parseCount(flag, s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 32)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("%s %q: use a whole number of 1 or more", flag, s)
	}
	return n, nil
}

var envPattern = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

func addEnv(s *carrelv1.WorkspaceSpec, v string) error {
	name, value, ok := strings.Cut(v, "=")
	if !ok || !envPattern.MatchString(name) {
		return fmt.Errorf("-e %q: use NAME=VALUE", name)
	}
	if strings.ContainsRune(value, 0) {
		return fmt.Errorf("-e %s: the value holds a zero byte", name)
	}
	if s.Env == nil {
		s.Env = map[string]string{}
	}
	s.Env[name] = value
	return nil
}

func addVolume(s *carrelv1.WorkspaceSpec, v string) error {
	parts := strings.Split(v, ":")
	readOnly := len(parts) == 3 && parts[2] == "ro"
	rightEnd := len(parts) == 2 || readOnly || (len(parts) == 3 && parts[2] == "rw")
	if !rightEnd || parts[0] == "" || !path.IsAbs(parts[1]) || path.Clean(parts[1]) != parts[1] || parts[1] == "/" {
		return fmt.Errorf("--volume %q: use NAME:/path or NAME:/path:ro, with an absolute path inside the workspace", v)
	}
	for _, m := range s.Volumes {
		if m.Target == parts[1] {
			return fmt.Errorf("--volume %q: two volumes at %s", v, parts[1])
		}
	}
	s.Volumes = append(s.Volumes, &carrelv1.VolumeMount{Volume: parts[0], Target: parts[1], ReadOnly: readOnly})
	return nil
}

// merge completes fields that hold several things by what the workspace has, so that a change replaces only what it names.
func (f *specFlags) merge(c *specChange, has *carrelv1.WorkspaceSpec) {
	if len(f.unsetEnv) > 0 || c.has("env") {
		env := map[string]string{}
		for k, v := range has.GetEnv() {
			env[k] = v
		}
		for _, k := range f.unsetEnv {
			delete(env, k)
		}
		for k, v := range c.spec.Env {
			env[k] = v
		}
		c.spec.Env = env
		c.add("env")
	}
	if len(f.unsetVolumes) > 0 || c.has("volumes") {
		var mounts []*carrelv1.VolumeMount
		for _, m := range has.GetVolumes() {
			gone := slices.Contains(f.unsetVolumes, m.GetTarget()) || slices.Contains(f.unsetVolumes, m.GetVolume())
			replaced := slices.ContainsFunc(c.spec.Volumes, func(n *carrelv1.VolumeMount) bool { return n.GetTarget() == m.GetTarget() })
			if !gone && !replaced {
				mounts = append(mounts, m)
			}
		}
		c.spec.Volumes = append(mounts, c.spec.Volumes...)
		c.add("volumes")
	}
}

func (c *specChange) add(field string) {
	if !c.has(field) {
		c.fields = append(c.fields, field)
	}
}

// difference is one field that would change.
type difference struct{ flag, has, wants string }

// differences lists what a change would make of what a workspace has; fields that agree are taken out of the change.
func (c *specChange) differences(has *carrelv1.WorkspaceSpec) []difference {
	var found []difference
	kept := c.fields[:0:0]
	for _, field := range c.fields {
		flag, show := fieldText(field)
		if before, after := show(has), show(c.spec); before != after {
			found = append(found, difference{flag, before, after})
			kept = append(kept, field)
		}
	}
	c.fields = kept
	return found
}

func fieldText(field string) (flag string, show func(*carrelv1.WorkspaceSpec) string) {
	type spec = carrelv1.WorkspaceSpec
	switch field {
	case "gpu":
		return "--gpu", func(s *spec) string { return gpuText(s.GetGpu().GetCount(), s.GetGpu().GetModels()) }
	case "image":
		return "--image", func(s *spec) string { return s.GetImage() }
	case "pool":
		return "--pool", func(s *spec) string { return s.GetPool() }
	case "cpu_millis":
		return "--cpus", func(s *spec) string { return cpuText(s.GetCpuMillis()) }
	case "memory_mib":
		return "--memory", func(s *spec) string { return output.MiB(s.GetMemoryMib()) }
	case "shm_mib":
		return "--shm", func(s *spec) string { return output.MiB(s.GetShmMib()) }
	case "pids_limit":
		return "--pids", func(s *spec) string { return fmt.Sprint(s.GetPidsLimit()) }
	case "env":
		return "-e", func(s *spec) string { return envText(s.GetEnv()) }
	default:
		return "--volume", func(s *spec) string { return mountsText(s.GetVolumes()) }
	}
}

func envText(env map[string]string) string {
	pairs := make([]string, 0, len(env))
	for k, v := range env {
		pairs = append(pairs, k+"="+v)
	}
	sort.Strings(pairs)
	return orDash(strings.Join(pairs, " "))
}

func mountsText(mounts []*carrelv1.VolumeMount) string {
	texts := make([]string, 0, len(mounts))
	for _, m := range mounts {
		text := m.GetVolume() + ":" + m.GetTarget()
		if m.GetReadOnly() {
			text += ":ro"
		}
		texts = append(texts, text)
	}
	sort.Strings(texts)
	return orDash(strings.Join(texts, " "))
}
