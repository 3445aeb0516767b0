package config

import (
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

func hostPort(value any) error {
	if _, port, err := net.SplitHostPort(value.(string)); err != nil || port == "" {
		return fmt.Errorf("must be HOST:PORT, such as 127.0.0.1:7070")
	}
	return nil
}

func optionalHostPort(value any) error {
	if value == "" {
		return nil
	}
	return hostPort(value)
}

func optionalURL(value any) error {
	if value == "" {
		return nil
	}
	u, err := url.Parse(value.(string))
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") || (u.Path != "" && u.Path != "/") || u.RawQuery != "" || u.Fragment != "" {
		return fmt.Errorf("must be a URL without path, such as https://carrel.example.org")
	}
	return nil
}

// hostNames takes names and addresses as they stand in a URL, without its other parts.
func hostNames(value any) error {
	for _, name := range value.([]string) {
		u, err := url.Parse("http://" + name)
		literal := net.ParseIP(name) != nil // IPv6 without brackets
		if !literal && (err != nil || name == "" || u.Host != name || u.Port() != "" || strings.HasSuffix(name, ":") || strings.ContainsAny(name, "*%_ ")) {
			return fmt.Errorf("must be names or addresses without scheme and port, such as carrel.example.org: not %q", name)
		}
	}
	return nil
}

func deploymentName(value any) error { return fleet.CheckName("deployment", value.(string)) }

func oneOf(words ...string) func(any) error {
	return func(value any) error {
		if slices.Contains(words, value.(string)) {
			return nil
		}
		return fmt.Errorf("must be one of %s", strings.Join(words, ", "))
	}
}

func atLeast(least int) func(any) error {
	return func(value any) error {
		if value.(int) < least {
			return fmt.Errorf("must be %d or more", least)
		}
		return nil
	}
}

func positive(value any) error {
	if value.(time.Duration) <= 0 {
		return fmt.Errorf("must be more than 0s")
	}
	return nil
}

// mountList reads the declared mounts; each names itself in its errors.
func mountList(value any) ([]fleet.DeclaredMount, error) {
	items, ok := value.([]any)
	if !ok {
		return nil, fmt.Errorf("is %T", value)
	}
	mounts := make([]fleet.DeclaredMount, 0, len(items))
	for i, item := range items {
		m, err := mountOf(item)
		if err != nil {
			return nil, fmt.Errorf("entry %d: %w", i+1, err)
		}
		if slices.ContainsFunc(mounts, func(o fleet.DeclaredMount) bool { return o.Name == m.Name }) {
			return nil, fmt.Errorf("entry %d: the name %s is used twice", i+1, m.Name)
		}
		mounts = append(mounts, m)
	}
	return mounts, nil
}

func mountOf(item any) (fleet.DeclaredMount, error) {
	var m fleet.DeclaredMount
	fields, ok := item.(map[string]any)
	if !ok {
		return m, fmt.Errorf("must have name and path")
	}
	for key, value := range fields {
		var ok bool
		switch key {
		case "name":
			m.Name, ok = value.(string)
		case "path":
			m.HostPath, ok = value.(string)
		case "read_only":
			m.ReadOnly, ok = value.(bool)
		case "public":
			m.Public, ok = value.(bool)
		default:
			return m, fmt.Errorf("unknown key %s; known are name, path, read_only, public", key)
		}
		if !ok {
			return m, fmt.Errorf("%s is %T", key, value)
		}
	}
	if err := fleet.CheckVolumeName(m.Name); err != nil {
		return m, err
	}
	if !filepath.IsAbs(m.HostPath) || filepath.Clean(m.HostPath) != m.HostPath || m.HostPath == "/" {
		return m, fmt.Errorf("path %q must be absolute and clean, and not /", m.HostPath)
	}
	return m, nil
}

// unlimitedOr takes -1 for no limit, or least and more. 0 is refused since it reads as either.
func unlimitedOr(least int) func(any) error {
	return func(value any) error {
		if n := value.(int); n != -1 && n < least {
			return fmt.Errorf("must be -1 for no limit, or %d or more", least)
		}
		return nil
	}
}
