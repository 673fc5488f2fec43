chunkTexts(byId("chunks"), data.chunks);

for (const name of Object.keys(data.fillings)) player(byId(name), data.fillings[name], name);
