package config

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"
)

// Flags defines a flag for every setting and `--config`; call Load after Parse.
func Flags(fs *flag.FlagSet) (file *string) {
	for _, s := range settings() {
		if s.kind == kindMounts {
			continue
		}
		if s.kind == kindBool {
			fs.Bool(s.flag(), false, s.doc)
			continue
		}
		fs.String(s.flag(), "", s.doc)
	}
	return fs.String("config", "", "settings file (YAML)")
}

// Load reads defaults, the file (none when empty), the environment and the flags that were set, and checks everything.
// The error lists every fault, with file and line where it has them.
func Load(file string, environ []string, fs *flag.FlagSet) (Config, error) {
	table := settings()
	v := viper.New()
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
	cfg := fill(v)
	faults = append(faults, cfg.crossCheck()...)
	if len(faults) > 0 {
		return Config{}, errors.Join(faults...)
	}
	return cfg, nil
}

// readFile takes a YAML file's values; unknown keys and wrong types are faults with their line.
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
		return nil // an empty file
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
		keyNode, value := node.Content[i], node.Content[i+1]
		key := prefix + keyNode.Value
		at := fmt.Sprintf("%s:%d", file, keyNode.Line)
		if seen[key] {
			faults = append(faults, fmt.Errorf("%s: %s is set twice", at, key))
		}
		seen[key] = true
		faults = append(faults, readEntry(v, table, file, at, key, value)...)
	}
	return faults
}

func readEntry(v *viper.Viper, table []setting, file, at, key string, value *yaml.Node) []error {
	i := slices.IndexFunc(table, func(s setting) bool { return s.key == key })
	if i < 0 {
		if slices.ContainsFunc(table, func(s setting) bool { return strings.HasPrefix(s.key, key+".") }) {
			return readMapping(v, table, file, key+".", value)
		}
		return []error{fmt.Errorf("%s: unknown setting %s%s", at, key, nearest(table, key))}
	}
	var raw any
	err := value.Decode(&raw)
	if err == nil {
		raw, err = table[i].fromFile(raw)
	}
	if err != nil {
		return []error{fmt.Errorf("%s: %s must be %s: %w", at, key, kindWords[table[i].kind], err)}
	}
	v.Set(key, raw)
	return nil
}

func readEnvironment(v *viper.Viper, table []setting, environ []string) []error {
	var faults []error
	for _, entry := range environ {
		name, text, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(name, EnvPrefix) {
			continue
		}
		i := slices.IndexFunc(table, func(s setting) bool { return s.env() == name })
		if i < 0 {
			faults = append(faults, fmt.Errorf("environment: %s is no setting", name))
			continue
		}
		value, err := table[i].parse(text)
		if err != nil {
			faults = append(faults, fmt.Errorf("environment: %s=%q must be %s", name, text, kindWords[table[i].kind]))
			continue
		}
		v.Set(table[i].key, value)
	}
	return faults
}

func readFlags(v *viper.Viper, table []setting, fs *flag.FlagSet) []error {
	if fs == nil {
		return nil
	}
	var faults []error
	fs.Visit(func(f *flag.Flag) {
		i := slices.IndexFunc(table, func(s setting) bool { return s.flag() == f.Name })
		if i < 0 {
			return // --config, or a flag of the program
		}
		value, err := table[i].parse(f.Value.String())
		if err != nil {
			faults = append(faults, fmt.Errorf("--%s %q must be %s", f.Name, f.Value.String(), kindWords[table[i].kind]))
			return
		}
		v.Set(table[i].key, value)
	})
	return faults
}

// nearest suggests a key with the same last part, or one that begins alike.
func nearest(table []setting, key string) string {
	last := key[strings.LastIndex(key, ".")+1:]
	for _, s := range table {
		if strings.HasSuffix(s.key, last) || (len(key) > 3 && strings.HasPrefix(s.key, key[:3])) {
			return "; did you mean " + s.key + "?"
		}
	}
	return "; `carreld config print` shows all settings"
}

// Print writes every setting with its effective value and meaning, as a file that Load takes.
func Print(w io.Writer, cfg Config) error {
	group := ""
	for _, s := range settings() {
		indent, name := "", s.key
		if head, last, ok := strings.Cut(s.key, "."); ok {
			indent, name = "  ", last
			if head != group {
				if _, err := fmt.Fprintf(w, "%s:\n", head); err != nil {
					return err
				}
			}
			group = head
		}
		text, err := yaml.Marshal(map[string]any{name: printable(cfg.values[s.key])})
		if err != nil {
			return err
		}
		body := fmt.Sprintf("# %s\n# environment %s, flag --%s\n%s", s.doc, s.env(), s.flag(), text)
		body = indent + strings.ReplaceAll(strings.TrimSuffix(body, "\n"), "\n", "\n"+indent) + "\n"
		if _, err := io.WriteString(w, body); err != nil {
			return err
		}
	}
	return nil
}
