package host

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// LowestUID is the lowest user id that a run may have without the policy's leave (DESIGN D8).
const LowestUID = 1000

// highestID is the highest user or group id that Linux has; the one above means "none".
const highestID = 1<<32 - 2

// Policy is what the owner of a host allows any gateway to ask of it. The zero policy allows every image and no host path.
type Policy struct {
	// Images are the references that may run: `registry.example.com/team/*`, or a whole registry `registry.example.com/`.
	// Empty: all.
	Images []string
	// Mounts are the directories of the host that declared mounts may lie in.
	Mounts []MountRoot
	// UIDs may be used although they are below LowestUID or another login's on this host.
	UIDs []UIDRange
	// MaxGPUs is the most devices that one run may have; 0: no limit.
	MaxGPUs int
	// What is kept back from workspaces.
	ReserveCPUMillis int64
	ReserveMemoryMiB int64
	ReserveDiskMiB   int64
}

// MountRoot is a directory that declared mounts may lie in.
type MountRoot struct {
	Path     string // absolute, without symbolic links
	Writable bool
}

// UIDRange is an inclusive range of user ids.
type UIDRange struct{ First, Last int64 }

// Check returns all that is wrong with the policy itself.
func (p *Policy) Check() []string {
	var faults []string
	for _, m := range p.Mounts {
		if !cleanAbsolute(m.Path) {
			faults = append(faults, fmt.Sprintf("mounts: %q is not an absolute path", m.Path))
		} else if why := forbiddenSource(m.Path); why != "" {
			faults = append(faults, fmt.Sprintf("mounts: %q %s", m.Path, why))
		}
	}
	for _, u := range p.UIDs {
		if u.First < 1 || u.Last < u.First || u.Last > highestID {
			faults = append(faults, fmt.Sprintf("uids: %d-%d is no range of user ids from 1 on", u.First, u.Last))
		}
	}
	for _, image := range p.Images {
		if image == "" || strings.ContainsAny(image, " \t\n") || strings.Contains(strings.TrimSuffix(image, "*"), "*") {
			faults = append(faults, fmt.Sprintf("images: %q is no reference, with at most one * at its end", image))
		}
	}
	for name, n := range map[string]int64{
		"max_gpus": int64(p.MaxGPUs), "reserve.cpus": p.ReserveCPUMillis,
		"reserve.memory": p.ReserveMemoryMiB, "reserve.disk": p.ReserveDiskMiB,
	} {
		if n < 0 {
			faults = append(faults, name+": may not be negative")
		}
	}
	slices.Sort(faults)
	return faults
}

// allowsImage matches a reference as it was asked for.
func (p *Policy) allowsImage(ref string) bool {
	if len(p.Images) == 0 {
		return true
	}
	full := fullReference(ref)
	name := full
	if i := strings.LastIndexAny(name, ":@"); i > strings.LastIndexByte(name, '/') {
		name = name[:i]
	}
	return slices.ContainsFunc(p.Images, func(pattern string) bool {
		pattern = fullReference(pattern)
		if prefix, wild := strings.CutSuffix(pattern, "*"); wild || strings.HasSuffix(pattern, "/") {
			return strings.HasPrefix(full, prefix)
		}
		return full == pattern || name == pattern
	})
}

// fullReference adds what the engine adds to a short reference: docker.io and library.
func fullReference(ref string) string {
	first, rest, found := strings.Cut(ref, "/")
	switch {
	case found && (strings.ContainsAny(first, ".:") || first == "localhost"):
		if first == "docker.io" && !strings.Contains(rest, "/") {
			return "docker.io/library/" + rest
		}
		return ref
	case found:
		return "docker.io/" + ref
	}
	return "docker.io/library/" + ref
}

func (p *Policy) allowsUID(uid int64) bool {
	return slices.ContainsFunc(p.UIDs, func(r UIDRange) bool { return r.First <= uid && uid <= r.Last })
}

// identity says what is wrong with who the user would be; empty: nothing.
func (p *Policy) identity(id Identity, passwd string) string {
	switch {
	case !loginName(id.Login):
		return fmt.Sprintf("the login %q is not a POSIX login of up to 32 characters; an admin can set it with `carrel user set`", id.Login)
	case id.UID < 1 || id.UID > highestID || id.GID < 1 || id.GID > highestID:
		return fmt.Sprintf("uid %d and gid %d are not both from 1 on", id.UID, id.GID)
	}
	for _, g := range id.Groups {
		if !loginName(g.Name) || g.GID < 1 || g.GID > highestID {
			return fmt.Sprintf("the group %q with gid %d is not allowed inside a workspace", g.Name, g.GID)
		}
	}
	if p.allowsUID(id.UID) {
		return ""
	}
	if id.UID < LowestUID {
		return fmt.Sprintf("uid %d is below %d, which belongs to this host's own services; give %s another uid, or allow it under `uids:` in the host policy file",
			id.UID, LowestUID, id.Login)
	}
	other, err := loginOf(passwd, id.UID)
	switch {
	case err != nil:
		return fmt.Sprintf("the host's logins cannot be read: %v", err)
	case other != "" && other != id.Login:
		return fmt.Sprintf("uid %d is the login %s on this host; give %s another uid, or allow it under `uids:` in the host policy file",
			id.UID, other, id.Login)
	}
	return ""
}

// loginOf finds a uid's login in a file of passwd(5); empty: nobody's.
func loginOf(passwd string, uid int64) (string, error) {
	f, err := os.Open(passwd)
	if err != nil {
		return "", err
	}
	defer f.Close()
	lines := bufio.NewScanner(io.LimitReader(f, 64<<20))
	for lines.Scan() {
		fields := strings.Split(lines.Text(), ":")
		if len(fields) < 3 {
			continue
		}
		if n, err := strconv.ParseInt(fields[2], 10, 64); err == nil && n == uid {
			return fields[0], nil
		}
	}
	return "", lines.Err()
}

// loginName is the portable form that useradd(8) accepts, up to 32 characters.
func loginName(s string) bool {
	if s == "" || len(s) > 32 {
		return false
	}
	for i, c := range []byte(s) {
		switch {
		case c >= 'a' && c <= 'z', c == '_':
		case i > 0 && (c >= '0' && c <= '9' || c == '-' || c == '.'):
		default:
			return false
		}
	}
	return true
}

// cleanAbsolute reports whether a path is absolute, in its shortest form and of plain characters.
func cleanAbsolute(path string) bool {
	return len(path) <= 4096 && filepath.IsAbs(path) && filepath.Clean(path) == path &&
		!strings.ContainsFunc(path, func(r rune) bool { return r < 0x20 || r == 0x7f || r == '\ufffd' })
}

// within reports whether path is root or below it.
func within(path, root string) bool {
	return path == root || root == "/" || strings.HasPrefix(path, root+"/")
}

// forbiddenSource says why a host path may never be mounted, whatever a policy says.
func forbiddenSource(path string) string {
	if path == "/" {
		return "is the whole host"
	}
	for _, root := range []string{
		"/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/root", "/run", "/sbin", "/sys", "/usr",
		"/var/lib/docker", "/var/lib/containerd", "/var/run",
	} {
		if within(path, root) || within(root, path) {
			return "holds or is part of " + root + ", which is the host's own"
		}
	}
	return ""
}

// forbiddenTarget says why nothing may be mounted at a path inside.
func forbiddenTarget(path string) string {
	if !cleanAbsolute(path) {
		return "is not an absolute path in its shortest form"
	}
	if path == "/" || path == "/var" || path == "/home" || path == "/tmp" {
		return "is needed by the image itself"
	}
	for _, root := range []string{
		"/.carrel", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/var/run",
	} {
		if within(path, root) {
			return "is in " + root + ", which is the image's own"
		}
	}
	return ""
}

// hostPath says why a declared mount is not allowed here; empty: it is. dataDir is the agent's own.
func (p *Policy) hostPath(m Mount, sudo bool, dataDir string) string {
	path := m.HostPath
	switch {
	case !cleanAbsolute(path):
		return fmt.Sprintf("its host path %q is not absolute and in its shortest form", path)
	case forbiddenSource(path) != "":
		return fmt.Sprintf("its host path %s %s", path, forbiddenSource(path))
	case within(path, dataDir) || within(dataDir, path):
		return fmt.Sprintf("its host path %s holds the agent's own data", path)
	case sudo && !m.Home && (!m.ReadOnly || !m.Public):
		return "a pool with sudo may use only mounts that are read-only and declared public; use a pool without sudo, or declare it so"
	}
	root, ok := p.rootOf(path)
	if !ok {
		return fmt.Sprintf("the host policy file does not allow %s; its owner can add it under `mounts:`", path)
	}
	if !m.ReadOnly && !root.Writable {
		return fmt.Sprintf("the host policy file allows %s for reading only", root.Path)
	}
	if why := trustedPath(path); why != "" {
		return why
	}
	if !m.ReadOnly {
		return nosuid(path)
	}
	return ""
}

func (p *Policy) rootOf(path string) (MountRoot, bool) {
	var best MountRoot
	for _, root := range p.Mounts {
		if within(path, root.Path) && len(root.Path) > len(best.Path) {
			best = root
		}
	}
	return best, best.Path != ""
}

// trustedPath says why a path could lead elsewhere by the time it is mounted: a symbolic link on the way, or a directory on
// the way in which somebody but root can put one.
func trustedPath(path string) string {
	childOwner := uint32(0)
	for at := path; ; at = filepath.Dir(at) {
		var st unix.Stat_t
		if err := unix.Lstat(at, &st); err != nil {
			return fmt.Sprintf("%s on this host: %v", at, err)
		}
		// In a directory with the sticky bit, what root owns can be replaced by root alone.
		replaceable := st.Mode&0o022 != 0 && (st.Mode&unix.S_ISVTX == 0 || childOwner != 0)
		switch {
		case st.Mode&unix.S_IFMT == unix.S_IFLNK:
			return fmt.Sprintf("%s is a symbolic link; declare the path that it leads to", at)
		case st.Mode&unix.S_IFMT != unix.S_IFDIR:
			return fmt.Sprintf("%s is not a directory", at)
		case at != path && (st.Uid != 0 || replaceable):
			return fmt.Sprintf("others than root can change what lies in %s; its owner must be root, and nobody else may write it", at)
		}
		if at == "/" {
			return ""
		}
		childOwner = st.Uid
	}
}

// nosuid says why a writable mount of path could bring root programs onto the host.
func nosuid(path string) string {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return fmt.Sprintf("%s on this host: %v", path, err)
	}
	if st.Flags&unix.ST_NOSUID == 0 || st.Flags&unix.ST_NODEV == 0 {
		return fmt.Sprintf("%s lies on a file system that is not mounted nosuid,nodev; mount it so, or declare it read-only", path)
	}
	return ""
}
